//! The aggregator's executable: this program, a build for another processor, or the file of a release.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use zae_limiter_infra::{
    Architecture, CHECKSUMS, ChecksumError, Checksums, Package, PackageError, is_zip, url,
};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

/// The aggregator's executable.
#[derive(clap::Args, Debug)]
pub(crate) struct Bootstrap {
    /// Executable of the aggregator, or its zip file from a release [default: this program]
    #[arg(long, value_name = "FILE", help_heading = "Aggregator")]
    bootstrap: Option<PathBuf>,

    /// SHA256SUMS of the release, which must list the file of --bootstrap; required for zip files
    #[arg(long, value_name = "FILE", requires = "bootstrap", help_heading = "Aggregator")]
    checksums: Option<PathBuf>,

    /// Processor that the executable must be built for [default: its own]
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Aggregator")]
    architecture: Option<ArchitectureArg>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ArchitectureArg {
    #[value(name = "x86_64")]
    X86_64,
    Arm64,
}

impl Bootstrap {
    /// The packed executable, after all checks.
    pub(crate) fn package(&self, context: &Context) -> Result<Package, Failure> {
        let file = match &self.bootstrap {
            Some(file) => file,
            None => context.program()?,
        };
        let program = read(file)?;
        self.check_sum(file, &program)?;
        // A release's file has the release's mark. A build of one's own need not.
        let pack = if is_zip(&program) { Package::of_this_release } else { Package::of };
        pack(&program, self.architecture()).map_err(|error: PackageError| {
            let hint = error.hint(self.architecture());
            refused(file).caused_by(&error).hint(hint)
        })
    }

    fn architecture(&self) -> Option<Architecture> {
        self.architecture.map(|one| match one {
            ArchitectureArg::X86_64 => Architecture::X86_64,
            ArchitectureArg::Arm64 => Architecture::Arm64,
        })
    }

    fn check_sum(&self, file: &Path, content: &[u8]) -> Result<(), Failure> {
        let Some(list) = &self.checksums else {
            if is_zip(content) {
                let message = format!("{} is a zip file without checksums", file.display());
                let from = url(CHECKSUMS);
                let hint = format!("download {from} and add --checksums {CHECKSUMS}");
                return Err(Failure::usage(message).hint(hint));
            }
            return Ok(());
        };
        let text = String::from_utf8_lossy(&read(list)?).into_owned();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let checked = Checksums::parse(&text).and_then(|list| list.check(&name, content));
        checked.map_err(|error| {
            let again = match &error {
                ChecksumError::Malformed { .. } => CHECKSUMS,
                ChecksumError::Unlisted { .. } | ChecksumError::Differs { .. } => &name,
            };
            let hint = format!("download {} again", url(again));
            refused(file).caused_by(&error).hint(hint)
        })
    }
}

fn refused(file: &Path) -> Failure {
    Failure::usage(format!("cannot deploy {} as the aggregator", file.display()))
}

fn read(file: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(file).map_err(|error| {
        let message = format!("could not read {}", file.display());
        Failure::new(ExitStatus::Error, message).caused_by(&error)
    })
}
