//! Exit statuses.

use std::process::ExitCode;

/// The exit statuses that scripts rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// Done, or admitted.
    Done,
    /// An error that none of the others describes.
    Error,
    /// Wrong usage: an option, a name or an amount breaks a rule. Nothing was done.
    Usage,
    /// The store did not answer.
    Unavailable,
    /// Not found.
    NotFound,
    /// Refused by a limit.
    Refused,
    /// The status of the command that ran under a lease, or 128 + the number of a signal.
    Other(u8),
}

impl ExitStatus {
    /// The number for the operating system.
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Error => 1,
            Self::Usage => 2,
            Self::Unavailable => 3,
            Self::NotFound => 4,
            Self::Refused => 5,
            Self::Other(code) => code,
        }
    }
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> Self {
        Self::from(status.code())
    }
}
