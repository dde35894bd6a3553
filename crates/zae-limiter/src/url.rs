use std::str::FromStr;
use std::sync::Arc;

use zae_limiter_core::{Error, Invalid, MemoryStore, Store};

#[cfg(feature = "sqlite")]
use zae_limiter_sqlite::{Durability, SqliteOptions};

/// Where a store is.
///
/// | address | store |
/// | --- | --- |
/// | `memory:` | in this process, gone with it; the fastest |
/// | `sqlite:limits.db` | one file, shared by all processes of a machine |
/// | `sqlite:limits.db?durability=full` | the same, every answered acquire on disk |
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreUrl {
    /// A [`MemoryStore`].
    Memory,
    /// A [`SqliteStore`](zae_limiter_sqlite::SqliteStore).
    #[cfg(feature = "sqlite")]
    Sqlite {
        /// The file, created on first use.
        path: std::path::PathBuf,
        /// What survives a power cut.
        durability: Durability,
    },
}

impl FromStr for StoreUrl {
    type Err = Invalid;

    fn from_str(url: &str) -> Result<Self, Invalid> {
        const RULE: &str = "use memory:, or sqlite:FILE, or sqlite:FILE?durability=full";
        // The part that is wrong goes into the error, so that a caller can point at it.
        let wrong = |part, rule| Invalid::new("store address", part, rule);
        match url.split_once(':') {
            Some(("memory", "")) => Ok(Self::Memory),
            Some(("memory", rest)) => Err(wrong(rest, "write memory: with nothing behind it")),
            #[cfg(feature = "sqlite")]
            Some(("sqlite", rest)) => {
                let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
                if path.is_empty() {
                    return Err(wrong(url, "name the file, as in sqlite:limits.db"));
                }
                let durability = match query {
                    "" | "durability=normal" => Durability::Normal,
                    "durability=full" => Durability::Full,
                    _ => {
                        let rule = "use durability=normal or durability=full after the ?";
                        return Err(wrong(query, rule));
                    }
                };
                Ok(Self::Sqlite { path: path.into(), durability })
            }
            #[cfg(not(feature = "sqlite"))]
            Some(("sqlite", _)) => {
                Err(wrong("sqlite", "this program was built without the sqlite feature"))
            }
            Some(("dynamodb", _)) => {
                Err(wrong("dynamodb", "this release has no DynamoDB store yet"))
            }
            Some((scheme, _)) => Err(wrong(scheme, RULE)),
            None => Err(wrong(url, RULE)),
        }
    }
}

impl StoreUrl {
    /// Opens the store.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] or [`Error::Unavailable`] when it cannot be opened.
    pub fn open(&self) -> Result<Arc<dyn Store>, Error> {
        match self {
            Self::Memory => Ok(Arc::new(MemoryStore::new())),
            #[cfg(feature = "sqlite")]
            Self::Sqlite { path, durability } => {
                let opened = SqliteOptions::new(path).durability(*durability).open();
                let store = opened.map_err(|error| {
                    if error.is_outage() {
                        Error::Unavailable { waited: std::time::Duration::ZERO, cause: error }
                    } else {
                        Error::Store(error)
                    }
                })?;
                Ok(Arc::new(store))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        assert_eq!("memory:".parse(), Ok(StoreUrl::Memory));
        for bad in ["", "memory", "memory:x", "redis:localhost", "dynamodb:t", "limits.db", ":"] {
            let error = bad.parse::<StoreUrl>().expect_err(bad);
            assert_eq!(error.field(), "store address");
        }
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn a_sqlite_address_names_a_file() {
        let url = |durability| StoreUrl::Sqlite { path: "a/b.db".into(), durability };
        assert_eq!("sqlite:a/b.db".parse(), Ok(url(Durability::Normal)));
        assert_eq!("sqlite:a/b.db?durability=full".parse(), Ok(url(Durability::Full)));
        for bad in ["sqlite:", "sqlite:?durability=full", "sqlite:a?durability=half", "sqlite:a?x"]
        {
            assert!(bad.parse::<StoreUrl>().is_err(), "{bad}");
        }
    }
}
