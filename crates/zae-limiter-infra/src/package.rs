//! Packs the aggregator for Lambda: an executable called `bootstrap` in a zip.
//!
//! Executables that Lambda could not start are rejected before the upload: those for another
//! processor, and those that need a newer C library than that of Amazon Linux 2023.

use std::io::{Cursor, Write as _};

use object::elf::{EM_AARCH64, EM_X86_64, FileHeader64};
use object::read::elf::FileHeader as _;
use object::{Endianness, FileKind};
use sha2::{Digest as _, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipWriter};

use crate::options::Architecture;

/// The version of the C library of `provided.al2023`.
pub const GLIBC_MAX: Glibc = Glibc(2, 34);

/// The most bytes of unpacked code that Lambda accepts.
const UNPACKED_MAX: usize = 250 * 1_024 * 1_024;

/// A version of the GNU C library: major and minor number.
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
    /// It is not a Linux executable for a supported processor.
    #[error("it is not a Linux program for x86_64 or arm64")]
    NotLinux,
    /// It is truncated or damaged.
    #[error("it is not a complete program: {0}")]
    Garbled(String),
    /// It is built for another processor.
    #[error("it is built for {}, not for {}", found.as_str(), wanted.as_str())]
    Architecture {
        /// The processor that it is built for.
        found: Architecture,
        /// The processor of the function.
        wanted: Architecture,
    },
    /// It needs a newer C library than Lambda's.
    #[error("it needs glibc {needed}, and Lambda's provided.al2023 has {GLIBC_MAX}")]
    Glibc {
        /// The version that it needs.
        needed: Glibc,
    },
    /// It is too large for Lambda.
    #[error("it has {size} bytes, and Lambda accepts {UNPACKED_MAX}")]
    TooLarge {
        /// Its size in bytes.
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

/// A packed aggregator, ready for the upload.
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
    /// Packs an executable, and checks that it is for the `wanted` processor if one is given. The
    /// same executable always gives the same bytes.
    ///
    /// # Errors
    ///
    /// [`PackageError`] if Lambda could not start it.
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

    /// The key of the object in the bucket. It contains the hash, so each executable has its own.
    pub fn key(&self) -> String {
        format!("code/{}.zip", self.hash)
    }

    /// The size of the executable in bytes.
    pub fn unpacked_size(&self) -> usize {
        self.unpacked
    }

    /// The processor that the executable is built for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The version of the C library that it needs. `None` for a static executable.
    pub fn glibc(&self) -> Option<Glibc> {
        self.glibc
    }

    /// Both sizes as text.
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

/// The processor that a program is built for, and the C library that it needs.
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

/// Parses `GLIBC_2.34`. `None` for versions of other libraries and `GLIBC_PRIVATE`.
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
    fn a_program_is_packed_as_an_executable_bootstrap() {
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
    fn a_program_for_another_processor_is_rejected() {
        let other = match here() {
            Architecture::X86_64 => Architecture::Arm64,
            Architecture::Arm64 => Architecture::X86_64,
        };
        let error = Package::of(&a_program(), Some(other)).expect_err("another processor");
        assert_eq!(error, PackageError::Architecture { found: here(), wanted: other });
    }

    #[test]
    fn a_damaged_program_is_rejected() {
        let program = a_program();
        for garbage in [&b""[..], b"#!/bin/sh\n", &program[..40], &program[..program.len() / 2]] {
            assert!(Package::of(garbage, None).is_err());
        }
    }

    #[test]
    fn a_program_that_needs_a_newer_c_library_is_rejected() {
        let program = a_program();
        let Some(needed) = Package::of(&program, None).unwrap().glibc() else { return };
        assert!(needed >= Glibc(2, 2), "{needed}");
        // Replaces the newest version that it needs by a later one of the same length.
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
