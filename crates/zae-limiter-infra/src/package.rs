//! The aggregator as Lambda takes it: an executable called `bootstrap` in a zip.
//!
//! What Lambda could not start is refused here, before anything is uploaded: another processor than
//! was asked for, or a C library newer than that of Amazon Linux 2023.

use std::io::{Cursor, Write as _};

use object::elf::{EM_AARCH64, EM_X86_64, FileHeader64};
use object::read::elf::FileHeader as _;
use object::{Endianness, FileKind};
use sha2::{Digest as _, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use crate::options::Architecture;

/// The C library of `provided.al2023`.
pub const GLIBC_MAX: Glibc = Glibc(2, 34);

/// The most that Lambda takes of a function's code, unpacked.
const UNPACKED_MAX: usize = 250 * 1_024 * 1_024;

/// A release of the GNU C library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Glibc(pub u32, pub u32);

impl std::fmt::Display for Glibc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// Why an executable cannot be the aggregator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackageError {
    /// It is no program for Linux.
    #[error("it is not a Linux program for x86_64 or arm64")]
    NotLinux,
    /// It is cut short, or garbled.
    #[error("it is not a complete program: {0}")]
    Garbled(String),
    /// It is for another processor.
    #[error("it is built for {}, not for {}", found.as_str(), wanted.as_str())]
    Architecture {
        /// What it is for.
        found: Architecture,
        /// What was asked for.
        wanted: Architecture,
    },
    /// Lambda's C library is too old for it.
    #[error("it needs glibc {needed}, and Lambda's provided.al2023 has {GLIBC_MAX}")]
    Glibc {
        /// What it needs.
        needed: Glibc,
    },
    /// Lambda takes no more than so much.
    #[error("it has {size} bytes, and Lambda takes {UNPACKED_MAX}")]
    TooLarge {
        /// How large it is.
        size: usize,
    },
}

impl PackageError {
    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotLinux | Self::Garbled(_) => {
                "give a Linux build of zae-limiter with --bootstrap FILE"
            }
            Self::Architecture { .. } => {
                "give a build for it with --bootstrap FILE, or choose the other --architecture"
            }
            Self::Glibc { .. } => {
                "build it for an older C library, for example with \
                 `cargo zigbuild --release --target x86_64-unknown-linux-gnu.2.34`, \
                 and give it with --bootstrap FILE"
            }
            Self::TooLarge { .. } => "build it with --release",
        }
    }
}

/// An aggregator, ready to be uploaded.
#[derive(Clone)]
pub struct Package {
    zip: Vec<u8>,
    unpacked: usize,
    hash: String,
    architecture: Architecture,
    glibc: Option<Glibc>,
}

impl std::fmt::Debug for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Package").field("hash", &self.hash).finish_non_exhaustive()
    }
}

impl Package {
    /// Packs an executable, for the processor that is wanted or for its own. The same one always gives
    /// the same bytes.
    ///
    /// # Errors
    ///
    /// [`PackageError`], when Lambda could not start it.
    pub fn of(program: &[u8], wanted: Option<Architecture>) -> Result<Self, PackageError> {
        let (found, glibc) = inspect(program)?;
        if let Some(wanted) = wanted.filter(|wanted| *wanted != found) {
            return Err(PackageError::Architecture { found, wanted });
        }
        if let Some(needed) = glibc.filter(|needed| *needed > GLIBC_MAX) {
            return Err(PackageError::Glibc { needed });
        }
        if program.len() > UNPACKED_MAX {
            return Err(PackageError::TooLarge { size: program.len() });
        }
        let zip = pack(program).map_err(|error| PackageError::Garbled(error.to_string()))?;
        let hash = Sha256::digest(program).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { zip, unpacked: program.len(), hash, architecture: found, glibc })
    }

    /// The zip.
    pub fn zip(&self) -> &[u8] {
        &self.zip
    }

    /// The SHA-256 of the executable.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Where it is kept in the bucket: another executable is another object.
    pub fn key(&self) -> String {
        format!("code/{}.zip", self.hash)
    }

    /// How many bytes the executable has.
    pub fn unpacked_size(&self) -> usize {
        self.unpacked
    }

    /// For which processor it is.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Which C library it needs; `None` for one that brings its own.
    pub fn glibc(&self) -> Option<Glibc> {
        self.glibc
    }

    /// How large it is, for people.
    pub fn size_text(&self) -> String {
        let megabytes = |bytes: usize| format!("{}.{} MB", bytes / 1_000_000, bytes / 100_000 % 10);
        format!("{} ({} unpacked)", megabytes(self.zip.len()), megabytes(self.unpacked))
    }
}

fn pack(program: &[u8]) -> zip::result::ZipResult<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    // A fixed time, so that the same program packs to the same bytes.
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Deflated)
        .last_modified_time(DateTime::default())
        .unix_permissions(0o755);
    zip.start_file("bootstrap", options)?;
    zip.write_all(program)?;
    Ok(zip.finish()?.into_inner())
}

/// For which processor a program is, and which C library it needs.
fn inspect(program: &[u8]) -> Result<(Architecture, Option<Glibc>), PackageError> {
    if !matches!(FileKind::parse(program), Ok(FileKind::Elf64)) {
        return Err(PackageError::NotLinux);
    }
    let garbled = |error: object::Error| PackageError::Garbled(error.to_string());
    let header = FileHeader64::<Endianness>::parse(program).map_err(garbled)?;
    let endian = header.endian().map_err(garbled)?;
    let architecture = match header.e_machine(endian) {
        EM_X86_64 => Architecture::X86_64,
        EM_AARCH64 => Architecture::Arm64,
        _ => return Err(PackageError::NotLinux),
    };
    let sections = header.sections(endian, program).map_err(garbled)?;
    let Some((needs, link)) = sections.gnu_verneed(endian, program).map_err(garbled)? else {
        return Ok((architecture, None));
    };
    let strings = sections.strings(endian, program, link).map_err(garbled)?;
    let mut newest = None;
    for need in needs {
        let (_, versions) = need.map_err(garbled)?;
        for version in versions {
            let name = version.map_err(garbled)?.name(endian, strings).map_err(garbled)?;
            newest = newest.max(glibc_of(&String::from_utf8_lossy(name)));
        }
    }
    Ok((architecture, newest))
}

/// `GLIBC_2.34`. Versions of other libraries, and `GLIBC_PRIVATE`, say nothing.
fn glibc_of(version: &str) -> Option<Glibc> {
    let mut numbers = version.strip_prefix("GLIBC_")?.split('.').map(str::parse::<u32>);
    Some(Glibc(numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// A small program that every Linux has.
    fn a_program() -> Vec<u8> {
        std::fs::read("/bin/sh").unwrap()
    }

    fn here() -> Architecture {
        if cfg!(target_arch = "aarch64") { Architecture::Arm64 } else { Architecture::X86_64 }
    }

    #[test]
    fn a_program_is_packed_as_bootstrap_and_can_be_run() {
        let program = a_program();
        let package = Package::of(&program, None).unwrap();
        let mut zip = zip::ZipArchive::new(Cursor::new(package.zip())).unwrap();
        assert_eq!(zip.len(), 1);
        let mut file = zip.by_name("bootstrap").unwrap();
        assert_eq!(file.unix_mode().unwrap() & 0o777, 0o755);
        let mut unpacked = Vec::new();
        file.read_to_end(&mut unpacked).unwrap();
        assert_eq!(unpacked, program);
        assert!(package.zip().len() < program.len());
    }

    #[test]
    fn the_same_program_packs_to_the_same_bytes_and_another_to_another_key() {
        let mut program = a_program();
        let package = Package::of(&program, None).unwrap();
        let again = Package::of(&program, None).unwrap();
        assert_eq!((again.zip(), again.key()), (package.zip(), package.key()));
        program.push(0);
        assert_ne!(Package::of(&program, None).unwrap().key(), package.key());
    }

    #[test]
    fn another_processor_is_refused() {
        let other = match here() {
            Architecture::X86_64 => Architecture::Arm64,
            Architecture::Arm64 => Architecture::X86_64,
        };
        let error = Package::of(&a_program(), Some(other)).expect_err("another processor");
        assert_eq!(error, PackageError::Architecture { found: here(), wanted: other });
    }

    #[test]
    fn what_is_no_program_is_refused() {
        let program = a_program();
        for garbage in [&b""[..], b"#!/bin/sh\n", &program[..40], &program[..program.len() / 2]] {
            assert!(Package::of(garbage, None).is_err());
        }
    }

    #[test]
    fn a_newer_c_library_is_refused() {
        let program = a_program();
        let Some(needed) = Package::of(&program, None).unwrap().glibc() else { return };
        assert!(needed >= Glibc(2, 2), "{needed}");
        // The name of the newest version it needs, with another number of the same length.
        let (old, new) = (format!("GLIBC_{needed}\0"), "GLIBC_2.99\0");
        let patched = replace(&program, old.as_bytes(), new.as_bytes());
        let error = Package::of(&patched, None).expect_err("a newer C library");
        assert_eq!(error, PackageError::Glibc { needed: Glibc(2, 99) });
        assert!(error.hint().contains("zigbuild"));
    }

    fn replace(text: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
        assert_eq!(old.len(), new.len());
        let mut text = text.to_vec();
        let places: Vec<usize> =
            (0..text.len() - old.len()).filter(|at| text[*at..].starts_with(old)).collect();
        assert!(!places.is_empty());
        for at in places {
            text[at..at + new.len()].copy_from_slice(new);
        }
        text
    }
}
