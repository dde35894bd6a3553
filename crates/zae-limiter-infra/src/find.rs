//! Finds the executable `zae-limiter` on this machine, for programs that deploy a stack themselves.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::options::Architecture;
use crate::package::{Package, PackageError};
use crate::release::{CHECKSUMS, function_file, url};
use crate::versions::PROGRAM;

/// The environment variable that names the executable.
pub const AGGREGATOR_VAR: &str = "ZAEL_AGGREGATOR";

/// Where to look for the executable. A named file is the only candidate; otherwise it is searched beside this
/// program and on the `PATH`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// The file that the program names.
    pub named: Option<PathBuf>,
    /// The file that [`AGGREGATOR_VAR`] names.
    pub variable: Option<PathBuf>,
    /// The path of this program.
    pub program: Option<PathBuf>,
    /// The variable `PATH`.
    pub path: Option<OsString>,
}

/// Why a candidate cannot be the aggregator.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unfit {
    /// The file cannot be read.
    Unreadable(io::ErrorKind),
    /// Lambda could not run it, or it belongs to another release.
    Package(PackageError),
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable(error) => write!(f, "it cannot be read: {error}"),
            Self::Package(error) => error.fmt(f),
        }
    }
}

/// No executable on this machine can be the aggregator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoAggregator {
    /// The candidates and what is wrong with each. Empty if there was none.
    pub tried: Vec<(PathBuf, Unfit)>,
    wanted: Architecture,
}

impl NoAggregator {
    /// What to do about it.
    pub fn hint(&self) -> String {
        let file = function_file(self.wanted);
        format!(
            "install it with `cargo install zae-limiter-cli --version {PROGRAM}`, \
             or download {} (its SHA-256 is in {}) and name it with {AGGREGATOR_VAR} or aggregator_file(), \
             or deploy a stack without usage records with no_aggregator()",
            url(&file),
            url(CHECKSUMS),
        )
    }
}

impl fmt::Display for NoAggregator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tried.is_empty() {
            return write!(
                f,
                "found no executable {} beside this program or on the PATH to deploy as the aggregator",
                executable()
            );
        }
        f.write_str("found no executable to deploy as the aggregator")?;
        for (at, (path, unfit)) in self.tried.iter().enumerate() {
            write!(f, "{} {}: {unfit}", if at == 0 { ":" } else { ";" }, path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for NoAggregator {}

impl Search {
    /// A search on this machine, for the named file if there is one.
    pub fn of_this_process(named: Option<&Path>) -> Self {
        Self {
            named: named.map(Path::to_owned),
            variable: std::env::var_os(AGGREGATOR_VAR).filter(|v| !v.is_empty()).map(PathBuf::from),
            program: std::env::current_exe().ok(),
            path: std::env::var_os("PATH"),
        }
    }

    /// The files to try, in this order.
    fn candidates(&self) -> Vec<Candidate> {
        if let Some(file) = self.named.as_ref().or(self.variable.as_ref()) {
            return vec![Candidate { file: file.clone(), must_exist: true }];
        }
        let beside = self.program.as_deref().and_then(Path::parent).map(Path::to_owned);
        let on_path = self.path.iter().flat_map(std::env::split_paths);
        let mut files: Vec<PathBuf> = Vec::new();
        for folder in beside.into_iter().chain(on_path).filter(|folder| folder.is_absolute()) {
            let file = folder.join(executable());
            if !files.contains(&file) {
                files.push(file);
            }
        }
        files.into_iter().map(|file| Candidate { file, must_exist: false }).collect()
    }

    /// Packs the first candidate that fits: an executable of this release that Lambda can run, for the `wanted`
    /// processor if one is given. A named file may also be the zip file of the release.
    ///
    /// # Errors
    ///
    /// [`NoAggregator`] with every candidate and the reason.
    pub fn package(&self, wanted: Option<Architecture>) -> Result<Package, NoAggregator> {
        self.package_with(wanted, |file| std::fs::read(file))
    }

    fn package_with(
        &self,
        wanted: Option<Architecture>,
        read: impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Package, NoAggregator> {
        let mut tried = Vec::new();
        for Candidate { file, must_exist } in self.candidates() {
            let unfit = match read(&file) {
                Ok(content) => match Package::of_this_release(&content, wanted) {
                    Ok(package) => return Ok(package),
                    Err(error) => Unfit::Package(error),
                },
                Err(error) if error.kind() == io::ErrorKind::NotFound && !must_exist => continue,
                Err(error) => Unfit::Unreadable(error.kind()),
            };
            tried.push((file, unfit));
        }
        Err(NoAggregator { tried, wanted: wanted.unwrap_or_default() })
    }
}

struct Candidate {
    file: PathBuf,
    must_exist: bool,
}

fn executable() -> String {
    format!("zae-limiter{}", std::env::consts::EXE_SUFFIX)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::package::samples;
    use crate::release::RELEASE_MARK;

    /// Searches among these files.
    fn found(search: &Search, files: &[(&str, Vec<u8>)]) -> Result<String, NoAggregator> {
        let files: BTreeMap<&Path, &Vec<u8>> =
            files.iter().map(|(path, content)| (Path::new(*path), content)).collect();
        let read = |path: &Path| match files.get(path) {
            Some(content) => Ok((*content).clone()),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        search.package_with(None, read).map(|package| package.hash().to_owned())
    }

    fn search() -> Search {
        Search {
            program: Some("/app/gateway".into()),
            path: Some("/usr/local/bin:relative:/usr/bin:/usr/local/bin".into()),
            ..Search::default()
        }
    }

    /// Executables of this release that differ in their last byte.
    fn good(number: u8) -> Vec<u8> {
        let mut program = samples::marked(RELEASE_MARK);
        program.push(number);
        program
    }

    fn hash(program: &[u8]) -> String {
        crate::release::sha256(program)
    }

    #[test]
    fn the_first_executable_that_fits_is_packed_in_the_order_of_the_places() {
        let all = [
            ("/named", good(1)),
            ("/variable", good(2)),
            ("/app/zae-limiter", good(3)),
            ("/usr/local/bin/zae-limiter", good(4)),
            ("/usr/bin/zae-limiter", good(5)),
        ];
        let everywhere =
            Search { named: Some("/named".into()), variable: Some("/variable".into()), ..search() };
        assert_eq!(found(&everywhere, &all), Ok(hash(&all[0].1)));
        let variable = Search { named: None, ..everywhere };
        assert_eq!(found(&variable, &all), Ok(hash(&all[1].1)));
        for first in 2..all.len() {
            assert_eq!(found(&search(), &all[first..]), Ok(hash(&all[first].1)), "{first}");
        }
    }

    #[test]
    fn an_executable_that_does_not_fit_is_skipped_and_reported() {
        let other = samples::marked("[zae-limiter function 0.0.9]");
        let files = [
            ("/app/zae-limiter", other),
            ("/usr/local/bin/zae-limiter", samples::mach_o()),
            ("/usr/bin/zae-limiter", samples::program()),
        ];
        let error = found(&search(), &files).expect_err("none fits");
        let reasons: Vec<&Unfit> = error.tried.iter().map(|(_, unfit)| unfit).collect();
        assert!(
            matches!(
                reasons[..],
                [
                    Unfit::Package(PackageError::Release { found: Some(_) }),
                    Unfit::Package(PackageError::NotLinux(_)),
                    Unfit::Package(PackageError::Release { found: None }),
                ]
            ),
            "{error:?}"
        );
        assert_eq!(
            error.to_string(),
            format!(
                "found no executable to deploy as the aggregator: \
                 /app/zae-limiter: it belongs to release 0.0.9, not to {PROGRAM}; \
                 /usr/local/bin/zae-limiter: it is a macOS program, and Lambda runs Linux programs; \
                 /usr/bin/zae-limiter: it is not the program zae-limiter {PROGRAM}"
            )
        );
        let mut files = files.to_vec();
        files[2].1 = good(1);
        assert_eq!(found(&search(), &files), Ok(hash(&files[2].1)));
    }

    #[test]
    fn a_named_file_is_the_only_candidate() {
        let files = [("/app/zae-limiter", good(1))];
        for search in [
            Search { named: Some("/absent".into()), ..search() },
            Search { variable: Some("/absent".into()), ..search() },
        ] {
            let error = found(&search, &files).expect_err("the named file is absent");
            let unfit = Unfit::Unreadable(io::ErrorKind::NotFound);
            assert_eq!(error.tried, [(PathBuf::from("/absent"), unfit)]);
        }
    }

    #[test]
    fn without_any_candidate_the_error_says_what_to_do() {
        for search in [search(), Search::default()] {
            let error = found(&search, &[]).expect_err("there is none");
            assert!(error.to_string().contains("zae-limiter beside this program or on the PATH"));
            for step in [
                "cargo install zae-limiter-cli",
                "ZAEL_AGGREGATOR",
                "no_aggregator()",
                "/SHA256SUMS",
            ] {
                assert!(error.hint().contains(step), "{step}");
            }
        }
    }
}
