//! The files of a release: their names, addresses and checksums, and the mark by which an executable
//! names the release that it belongs to.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use crate::options::Architecture;
use crate::versions::PROGRAM;

/// The mark of this release. Only an executable that can run as the aggregator contains it. A program that
/// merely links this crate does not.
pub const RELEASE_MARK: &str = concat!("[zae-limiter function ", env!("CARGO_PKG_VERSION"), "]");

/// What follows the bracket in a mark.
const MARK_START: &[u8] = b"zae-limiter function ";

/// The longest version in a mark, in bytes.
const VERSION_MAX: usize = 32;

/// The file with the SHA-256 of every file of a release.
pub const CHECKSUMS: &str = "SHA256SUMS";

/// The release in the mark of an executable. `None` without a mark.
pub fn release_of(program: &[u8]) -> Option<&str> {
    program.split(|byte| *byte == b'[').skip(1).find_map(|rest| {
        let rest = rest.strip_prefix(MARK_START)?;
        let end = rest.iter().take(VERSION_MAX + 1).position(|byte| *byte == b']')?;
        let version = str::from_utf8(&rest[..end]).ok()?;
        let is_version = version.starts_with(|first: char| first.is_ascii_digit());
        is_version.then_some(version)
    })
}

/// The name of the aggregator's zip file in this release.
pub fn function_file(architecture: Architecture) -> String {
    format!("zae-limiter-{PROGRAM}-lambda-{}.zip", architecture.as_str())
}

/// The address of a file of this release.
pub fn url(file: &str) -> String {
    format!("{}/releases/download/v{PROGRAM}/{file}", env!("CARGO_PKG_REPOSITORY"))
}

/// How to deploy with the aggregator from the release, as a hint of the command line.
pub(crate) fn download_hint(architecture: Architecture) -> String {
    let file = function_file(architecture);
    format!(
        "download {} and {}, then add --bootstrap {file} --checksums {CHECKSUMS}",
        url(&file),
        url(CHECKSUMS)
    )
}

/// Why a file does not pass the check against a list of checksums.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChecksumError {
    /// The list has a line that is not a checksum and a name.
    #[error("line {line} of the checksums is not a SHA-256 and a file name")]
    Malformed {
        /// The number of the line, from 1.
        line: usize,
    },
    /// The list does not contain the file.
    #[error("the checksums do not list {name}")]
    Unlisted {
        /// The name of the file.
        name: String,
    },
    /// The file has another checksum.
    #[error("its SHA-256 is {found}, and the checksums say {listed}")]
    Differs {
        /// The checksum of the file.
        found: String,
        /// The checksum in the list.
        listed: String,
    },
}

/// A list of checksums, as `sha256sum` writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksums(BTreeMap<String, String>);

impl Checksums {
    /// Parses a list: in each line a SHA-256 and a file name.
    ///
    /// # Errors
    ///
    /// [`ChecksumError::Malformed`].
    pub fn parse(text: &str) -> Result<Self, ChecksumError> {
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let entries =
            lines.map(|(at, line)| entry(line).ok_or(ChecksumError::Malformed { line: at + 1 }));
        entries.collect::<Result<_, _>>().map(Self)
    }

    /// Compares a file with the list.
    ///
    /// # Errors
    ///
    /// [`ChecksumError`] if the list does not contain the name, or has another checksum for it.
    pub fn check(&self, name: &str, content: &[u8]) -> Result<(), ChecksumError> {
        let Some(listed) = self.0.get(name) else {
            return Err(ChecksumError::Unlisted { name: name.to_owned() });
        };
        let found = sha256(content);
        match found == *listed {
            true => Ok(()),
            false => Err(ChecksumError::Differs { found, listed: listed.clone() }),
        }
    }
}

/// Parses a line of `sha256sum`: the name follows two spaces, or a space and a star.
fn entry(line: &str) -> Option<(String, String)> {
    let (sum, name) = line.split_once(' ')?;
    let name = name.strip_prefix([' ', '*']).unwrap_or(name).trim_end();
    let name = name.strip_prefix("./").unwrap_or(name);
    let is_sum = sum.len() == 64 && sum.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_sum && !name.is_empty()).then(|| (name.to_owned(), sum.to_lowercase()))
}

pub(crate) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_executable_names_its_release_by_the_mark() {
        let marked =
            |mark: &str| format!("\x7fELF [zae-limiter function [x] {mark} more]").into_bytes();
        let release = |mark: &str| release_of(&marked(mark)).map(str::to_owned);
        assert_eq!(release(RELEASE_MARK).as_deref(), Some(PROGRAM));
        assert_eq!(release("[zae-limiter function 0.2.0-rc.1]").as_deref(), Some("0.2.0-rc.1"));
        for other in [
            "",
            "[zae-limiter function ]",
            "[zae-limiter function is]",
            "zae-limiter function 0.1.0]",
        ] {
            assert_eq!(release(other), None, "{other}");
        }
        let endless = format!("[zae-limiter function {}]", "1".repeat(VERSION_MAX + 1));
        assert_eq!(release(&endless), None);
        assert_eq!(release_of(b"[zae-limiter function 0.1.0"), None, "cut off");
        // The text that the search itself compares with is no mark.
        assert_eq!(release_of(MARK_START), None);
    }

    #[test]
    fn a_file_must_have_the_checksum_in_the_list() {
        // echo -n abc | sha256sum
        let sum = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let list = format!("{sum}  a.zip\n\n{} *b.zip\r\n{sum}  ./c.zip\n", "0".repeat(64));
        let list = Checksums::parse(&list).expect("a list");
        assert_eq!(list.check("a.zip", b"abc"), Ok(()));
        assert_eq!(list.check("c.zip", b"abc"), Ok(()));
        let listed = "0".repeat(64);
        let differs = ChecksumError::Differs { found: sum.to_owned(), listed };
        assert_eq!(list.check("b.zip", b"abc"), Err(differs));
        assert!(matches!(list.check("a.zip", b"abd"), Err(ChecksumError::Differs { .. })));
        let unlisted = ChecksumError::Unlisted { name: "d.zip".to_owned() };
        assert_eq!(list.check("d.zip", b"abc"), Err(unlisted));
    }

    #[test]
    fn a_list_with_anything_else_in_it_is_rejected() {
        let sum = "0".repeat(64);
        for bad in ["<html>", &sum, &format!("{sum}  "), &format!("{}  a.zip", &sum[1..])] {
            let list = format!("{sum}  a.zip\n{bad}");
            assert_eq!(Checksums::parse(&list), Err(ChecksumError::Malformed { line: 2 }), "{bad}");
        }
    }
}
