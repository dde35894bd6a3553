//! How the program ends.

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
    /// There is no such thing.
    NotFound,
    /// Refused by a limit.
    Refused,
    /// The status of the command that ran under a lease, or of the signal that ended it or us.
    Other(u8),
}

impl ExitStatus {
    /// The number that the operating system gets.
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
