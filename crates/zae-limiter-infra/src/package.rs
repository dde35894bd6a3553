//! Packs the aggregator for Lambda: an executable called `bootstrap` in a zip.
//!
//! Executables that Lambda could not start are rejected before the upload: those for another system
//! or processor, and those that need a newer C library than that of Amazon Linux 2023. So are those
//! of another release.

use std::io::{Cursor, Read as _, Write as _};

use object::elf::{EM_AARCH64, EM_X86_64, FileHeader64};
use object::read::elf::FileHeader as _;
use object::{Endianness, FileKind};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, DateTime, ZipArchive, ZipWriter};

use crate::options::Architecture;
use crate::release::{download_hint, release_of, sha256};
use crate::versions::PROGRAM;

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

/// What a file is that is not a Linux executable for a supported processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotLinux {
    /// An executable of macOS.
    MacOs,
    /// An executable of Windows.
    Windows,
    /// Something else.
    Unknown,
}

impl std::fmt::Display for NotLinux {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::MacOs => "it is a macOS program, and Lambda runs Linux programs",
            Self::Windows => "it is a Windows program, and Lambda runs Linux programs",
            Self::Unknown => "it is not a Linux program for x86_64 or arm64",
        })
    }
}

/// Why an executable cannot be the aggregator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackageError {
    /// It is not a Linux executable for a supported processor.
    #[error("{0}")]
    NotLinux(NotLinux),
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
    /// It belongs to another release, or does not name its release.
    #[error("{}", release_text(found.as_deref()))]
    Release {
        /// The release that it names.
        found: Option<String>,
    },
    /// It is too large for Lambda.
    #[error("it has {size} bytes, and Lambda accepts {UNPACKED_MAX}")]
    TooLarge {
        /// Its size in bytes.
        size: usize,
    },
}

impl PackageError {
    /// What to do about it on the command line. `wanted` is the processor of the function, if it
    /// was chosen.
    pub fn hint(&self, wanted: Option<Architecture>) -> String {
        let download = download_hint(wanted.unwrap_or_default());
        match self {
            Self::NotLinux(_) | Self::Garbled(_) | Self::Release { .. } => download,
            Self::Architecture { .. } => format!("{download}; or choose the other --architecture"),
            Self::Glibc { .. } => format!(
                "{download}; or build it for an older C library, for example with \
                 `cargo zigbuild --release --target x86_64-unknown-linux-gnu.2.34`"
            ),
            Self::TooLarge { .. } => "build it with --release".to_owned(),
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
    has_release: bool,
}

impl std::fmt::Debug for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Package").field("hash", &self.hash).finish_non_exhaustive()
    }
}

impl Package {
    /// Packs an executable, and checks that it is for the `wanted` processor if one is given. The
    /// same executable always gives the same bytes. A zip file with an executable `bootstrap`, as
    /// in a release, counts as that executable.
    ///
    /// An executable may lack the mark of a release, but may not have that of another one.
    ///
    /// # Errors
    ///
    /// [`PackageError`] if Lambda could not start it.
    pub fn of(program: &[u8], wanted: Option<Architecture>) -> Result<Self, PackageError> {
        if is_zip(program) {
            return Self::of_executable(&unpack(program)?, wanted);
        }
        Self::of_executable(program, wanted)
    }

    /// As [`of`](Self::of), but only for an executable with the mark of this release.
    ///
    /// # Errors
    ///
    /// [`PackageError`] if Lambda could not start it, or if it is not of this release.
    pub fn of_this_release(
        program: &[u8],
        wanted: Option<Architecture>,
    ) -> Result<Self, PackageError> {
        let package = Self::of(program, wanted)?;
        if package.has_release { Ok(package) } else { Err(PackageError::Release { found: None }) }
    }

    fn of_executable(program: &[u8], wanted: Option<Architecture>) -> Result<Self, PackageError> {
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
        let release = release_of(program);
        if let Some(other) = release.filter(|release| *release != PROGRAM) {
            return Err(PackageError::Release { found: Some(other.to_owned()) });
        }
        let (zip, hash) = (pack(program).map_err(damaged)?, sha256(program));
        let (unpacked, has_release) = (program.len(), release.is_some());
        Ok(Self { zip, unpacked, hash, architecture: found, glibc, has_release })
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

/// Whether a file is a zip file.
pub fn is_zip(content: &[u8]) -> bool {
    content.starts_with(b"PK\x03\x04")
}

/// The executable in a zip file.
fn unpack(zip: &[u8]) -> Result<Vec<u8>, PackageError> {
    let mut zip = ZipArchive::new(Cursor::new(zip)).map_err(damaged)?;
    let file = zip.by_name("bootstrap").map_err(damaged)?;
    let mut program = Vec::new();
    // A zip file may claim any size: read one byte more than Lambda accepts, and no further.
    let limit = u64::try_from(UNPACKED_MAX).unwrap_or(u64::MAX).saturating_add(1);
    file.take(limit).read_to_end(&mut program).map_err(damaged)?;
    match program.len() > UNPACKED_MAX {
        true => Err(PackageError::TooLarge { size: program.len() }),
        false => Ok(program),
    }
}

fn damaged(error: impl std::fmt::Display) -> PackageError {
    PackageError::Garbled(error.to_string())
}

fn release_text(found: Option<&str>) -> String {
    match found {
        Some(found) => format!("it belongs to release {found}, not to {PROGRAM}"),
        None => format!("it is not the program zae-limiter {PROGRAM}"),
    }
}

/// What a file is that is not a Linux executable, by its first bytes.
fn not_linux(content: &[u8]) -> PackageError {
    const MACH_O: [[u8; 4]; 4] = [
        [0xcf, 0xfa, 0xed, 0xfe],
        [0xce, 0xfa, 0xed, 0xfe],
        // Several processors in one file.
        [0xca, 0xfe, 0xba, 0xbe],
        [0xca, 0xfe, 0xba, 0xbf],
    ];
    PackageError::NotLinux(match content {
        _ if MACH_O.iter().any(|magic| content.starts_with(magic)) => NotLinux::MacOs,
        [b'M', b'Z', ..] => NotLinux::Windows,
        _ => NotLinux::Unknown,
    })
}

/// The processor that a program is built for, and the C library that it needs.
fn inspect(program: &[u8]) -> Result<(Architecture, Option<Glibc>), PackageError> {
    if !matches!(FileKind::parse(program), Ok(FileKind::Elf64)) {
        return Err(not_linux(program));
    }
    let header = FileHeader64::<Endianness>::parse(program).map_err(damaged)?;
    let endian = header.endian().map_err(damaged)?;
    let architecture = match header.e_machine(endian) {
        EM_X86_64 => Architecture::X86_64,
        EM_AARCH64 => Architecture::Arm64,
        _ => return Err(PackageError::NotLinux(NotLinux::Unknown)),
    };
    let sections = header.sections(endian, program).map_err(damaged)?;
    let Some((needs, link)) = sections.gnu_verneed(endian, program).map_err(damaged)? else {
        return Ok((architecture, None));
    };
    let strings = sections.strings(endian, program, link).map_err(damaged)?;
    let mut newest = None;
    for need in needs {
        let (_, versions) = need.map_err(damaged)?;
        for version in versions {
            let name = version.map_err(damaged)?.name(endian, strings).map_err(damaged)?;
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
pub(crate) mod samples;
#[cfg(test)]
mod tests;
