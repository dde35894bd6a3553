//! `lambda-export`

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

use super::deploy::Bootstrap;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter lambda-export                                  writes aggregator.zip
  zae-limiter lambda-export lambda.zip --force               replaces lambda.zip
  zae-limiter lambda-export arm.zip --bootstrap ./target/aarch64-unknown-linux-gnu/release/zae-limiter

The zip file contains one executable, named bootstrap, for the runtime provided.al2023.

--output is the output format, as with every command. `--output FILE` of the Python program works, too.";

/// Arguments of `lambda-export`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Zip file to write
    #[arg(value_name = "FILE", default_value = "aggregator.zip")]
    file: PathBuf,

    /// Replace the file if it exists
    #[arg(short, long)]
    force: bool,

    #[command(flatten)]
    bootstrap: Bootstrap,
}

#[derive(Serialize)]
struct ExportJson<'a> {
    file: String,
    bytes: usize,
    unpacked_bytes: usize,
    sha256: &'a str,
    architecture: &'static str,
    glibc: Option<String>,
}

pub(crate) fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let package = args.bootstrap.package(context)?;
    let file = args.file.display().to_string();
    write(&args.file, package.zip(), args.force)?;
    let glibc = package.glibc().map(|needed| needed.to_string());
    let library = match &glibc {
        Some(needed) => format!("needs glibc {needed}"),
        None => "needs no C library".to_owned(),
    };
    let architecture = package.architecture().as_str();
    let words = format!("wrote {file}: {}, {architecture}, {library}", package.size_text());
    let document = ExportJson {
        file,
        bytes: package.zip().len(),
        unpacked_bytes: package.unpacked_size(),
        sha256: package.hash(),
        architecture,
        glibc,
    };
    context.printer.done(&document, words);
    Ok(ExitStatus::Done)
}

/// Writes a file. An existing one is replaced only with `force`.
pub(super) fn write(file: &Path, content: &[u8], force: bool) -> Result<(), Failure> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).create_new(!force);
    let written = options.open(file).and_then(|mut opened| opened.write_all(content));
    written.map_err(|error| {
        let name = file.display();
        if error.kind() == ErrorKind::AlreadyExists {
            let failure = Failure::new(ExitStatus::Error, format!("{name} exists already"));
            return failure.hint("replace it with --force");
        }
        Failure::new(ExitStatus::Error, format!("could not write {name}")).caused_by(&error)
    })
}
