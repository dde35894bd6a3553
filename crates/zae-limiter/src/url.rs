use std::str::FromStr;
use std::sync::Arc;

use zae_limiter_core::{Error, Invalid, MemoryStore, Store};

#[cfg(feature = "dynamodb")]
use zae_limiter_dynamodb::aws::{DynamoAddress, LazyTable};
#[cfg(feature = "sqlite")]
use zae_limiter_sqlite::{Durability, SqliteOptions};

/// The URL of a store.
///
/// | URL | store |
/// | --- | --- |
/// | `memory:` | in the memory of this process; the fastest |
/// | `sqlite:limits.db` | one file, shared by all processes of a machine |
/// | `sqlite:/var/lib/limits.db`, `sqlite:///var/lib/limits.db` | the same, by its absolute path |
/// | `sqlite:limits.db?durability=full` | the same, with every answered acquire on disk |
/// | `dynamodb:my-app?region=eu-west-1` | one table, shared by any number of machines |
/// | `dynamodb:my-app?endpoint=http://127.0.0.1:8000` | the same at another endpoint than AWS's |
///
/// ```
/// use zae_limiter::{RateLimiter, StoreUrl};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let url: StoreUrl = "memory:".parse()?;
/// assert_eq!(url, StoreUrl::Memory);
/// let limiter = RateLimiter::builder(url.open()?).open().await?;
/// assert!("redis:localhost".parse::<StoreUrl>().is_err());
/// # Ok::<(), zae_limiter::Error>(())
/// # }).unwrap();
/// ```
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
    /// A [`DynamoStore`](zae_limiter_dynamodb::DynamoStore).
    #[cfg(feature = "dynamodb")]
    Dynamodb(DynamoAddress),
}

/// An error about one part of a URL, so that a caller can highlight it.
fn wrong(part: &str, rule: &'static str) -> Invalid {
    Invalid::new("store address", part, rule)
}

impl FromStr for StoreUrl {
    type Err = Invalid;

    fn from_str(url: &str) -> Result<Self, Invalid> {
        const RULE: &str =
            "use memory:, or sqlite:FILE, or sqlite:FILE?durability=full, or dynamodb:TABLE";
        match url.split_once(':') {
            Some(("memory", "")) => Ok(Self::Memory),
            Some(("memory", rest)) => Err(wrong(rest, "write memory: with nothing behind it")),
            Some(("sqlite", rest)) => sqlite(url, rest),
            Some(("dynamodb", rest)) => dynamodb(url, rest),
            Some((scheme, _)) => Err(wrong(scheme, RULE)),
            None => Err(wrong(url, RULE)),
        }
    }
}

#[cfg(feature = "sqlite")]
fn sqlite(url: &str, rest: &str) -> Result<StoreUrl, Invalid> {
    const NAME: &str = "name the file, as in sqlite:limits.db";
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    // Everything but `?` belongs to the path as it is: a percent sign, too, is a percent sign.
    let path = match path.strip_prefix("//") {
        // As in a file: URL, an absolute path follows an empty host.
        Some(absolute) if absolute.starts_with('/') => absolute,
        Some("") => return Err(wrong(url, NAME)),
        // `//x.db` is `/x.db` for the operating system, which nobody means.
        Some(_) => {
            let rule = "after // comes a host, and a file has none: write sqlite:x.db (relative) or \
                        sqlite:/x.db (absolute)";
            return Err(wrong(path, rule));
        }
        None => path,
    };
    if path.starts_with(":memory:") {
        return Err(wrong(path, "a store in memory is memory:, without sqlite"));
    }
    if path.is_empty() || path.ends_with('/') {
        return Err(wrong(url, NAME));
    }
    let durability = match query {
        "" | "durability=normal" => Durability::Normal,
        "durability=full" => Durability::Full,
        _ => return Err(wrong(query, "use durability=normal or durability=full after the ?")),
    };
    Ok(StoreUrl::Sqlite { path: path.into(), durability })
}

#[cfg(not(feature = "sqlite"))]
fn sqlite(_: &str, _: &str) -> Result<StoreUrl, Invalid> {
    Err(wrong("sqlite", "this program was built without the sqlite feature"))
}

#[cfg(feature = "dynamodb")]
fn dynamodb(url: &str, rest: &str) -> Result<StoreUrl, Invalid> {
    let (table, query) = rest.split_once('?').unwrap_or((rest, ""));
    if table.is_empty() {
        return Err(wrong(url, "name the table, as in dynamodb:my-app"));
    }
    let legal = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    if !(3..=255).contains(&table.len()) || !table.chars().all(legal) {
        return Err(wrong(table, "a table's name is 3 to 255 of A-Z a-z 0-9 _ . -"));
    }
    let mut address = DynamoAddress { table: table.to_owned(), region: None, endpoint: None };
    for part in query.split('&').filter(|part| !part.is_empty()) {
        match part.split_once('=') {
            Some(("region", region)) => {
                StoreUrl::check_region(region).map_err(|invalid| wrong(part, invalid.rule()))?;
                address.region = Some(region.to_owned());
            }
            Some(("endpoint", endpoint)) => {
                StoreUrl::check_endpoint(endpoint)
                    .map_err(|invalid| wrong(part, invalid.rule()))?;
                address.endpoint = Some(endpoint.to_owned());
            }
            _ => {
                return Err(wrong(
                    part,
                    "use region=NAME or endpoint=http://HOST:PORT after the ?",
                ));
            }
        }
    }
    Ok(StoreUrl::Dynamodb(address))
}

#[cfg(not(feature = "dynamodb"))]
fn dynamodb(_: &str, _: &str) -> Result<StoreUrl, Invalid> {
    Err(wrong("dynamodb", "this program was built without the dynamodb feature"))
}

impl StoreUrl {
    /// Checks the name of an AWS region, such as `eu-west-1`. Emulators accept others, so any host label is
    /// legal.
    ///
    /// # Errors
    ///
    /// [`Invalid`] with the rule.
    pub fn check_region(region: &str) -> Result<(), Invalid> {
        let is_legal = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let is_bounded = !region.starts_with('-') && !region.ends_with('-');
        if (1..=63).contains(&region.len()) && is_bounded && region.chars().all(is_legal) {
            return Ok(());
        }
        Err(Invalid::new("region", region, "a region is letters, digits and -, as in eu-west-1"))
    }

    /// Checks the URL of an endpoint, such as `http://127.0.0.1:8000`.
    ///
    /// # Errors
    ///
    /// [`Invalid`] with the rule.
    pub fn check_endpoint(url: &str) -> Result<(), Invalid> {
        const RULE: &str = "write http://HOST:PORT or https://HOST, as in http://127.0.0.1:8000";
        let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        let is_legal = rest.is_some_and(|rest| {
            let (place, path) = rest.split_once('/').unwrap_or((rest, ""));
            // An IPv6 address has brackets, because it contains colons.
            let (host, port) = match place.rsplit_once(':') {
                Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
                _ => (place, None),
            };
            let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let is_host = match v6 {
                Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
                None => {
                    let is_legal = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
                    !host.is_empty() && host.chars().all(is_legal)
                }
            };
            let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
            let is_path = |c: char| c.is_ascii_graphic() && !"?#&".contains(c);
            is_host && is_port && path.chars().all(is_path)
        });
        if is_legal { Ok(()) } else { Err(Invalid::new("endpoint", url, RULE)) }
    }

    /// Opens the store. A DynamoDB store connects to its table on first use, in a limiter's `open`.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] or [`Error::Unavailable`] when the store cannot be opened.
    pub fn open(&self) -> Result<Arc<dyn Store>, Error> {
        match self {
            Self::Memory => Ok(Arc::new(MemoryStore::new())),
            #[cfg(feature = "sqlite")]
            Self::Sqlite { path, durability } => {
                let opened = SqliteOptions::new(path).durability(*durability).open();
                let store = opened.map_err(|error| {
                    if error.is_transient() {
                        Error::Unavailable { waited: std::time::Duration::ZERO, cause: error }
                    } else {
                        Error::Store(error)
                    }
                })?;
                Ok(Arc::new(store))
            }
            #[cfg(feature = "dynamodb")]
            Self::Dynamodb(address) => {
                let table = Arc::new(LazyTable::new(address.clone()));
                let options = zae_limiter_dynamodb::DynamoOptions::default();
                Ok(Arc::new(zae_limiter_dynamodb::DynamoStore::new(table, options)))
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
        for bad in ["", "memory", "memory:x", "redis:localhost", "dynamodb:", "limits.db", ":"] {
            let error = bad.parse::<StoreUrl>().expect_err(bad);
            assert_eq!(error.field(), "store address");
        }
    }

    #[test]
    fn regions_and_endpoints_are_checked_before_any_call() {
        for region in ["eu-west-1", "us-gov-east-1", "local", "A1"] {
            assert_eq!(StoreUrl::check_region(region), Ok(()), "{region}");
        }
        for region in ["", "not a region", "-a", "a-", "eu_west_1", "eu-west-1.evil", "é"] {
            assert!(StoreUrl::check_region(region).is_err(), "{region}");
        }
        for url in [
            "http://localhost",
            "https://dynamodb.eu-west-1.amazonaws.com",
            "http://127.0.0.1:8000",
            "http://[::1]:8000/path/",
            "http://[::1]",
            "http://my_host:1",
        ] {
            assert_eq!(StoreUrl::check_endpoint(url), Ok(()), "{url}");
        }
        for url in [
            "",
            "localhost:8000",
            "http://",
            "http://:8000",
            "http://a b",
            "http://host:port",
            "http://host:0",
            "http://host:70000",
            "http://[::g]:80",
            "http://host/a?b",
            "http://user@host",
            "ftp://host",
        ] {
            assert!(StoreUrl::check_endpoint(url).is_err(), "{url}");
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

    #[cfg(feature = "sqlite")]
    #[test]
    fn two_slashes_need_an_absolute_path() {
        let url =
            |path: &str| StoreUrl::Sqlite { path: path.into(), durability: Durability::Normal };
        for (text, path) in [
            ("sqlite:/a/b.db", "/a/b.db"),
            ("sqlite:///a/b.db", "/a/b.db"),
            ("sqlite:///a%20b.db", "/a%20b.db"),
            ("sqlite:./a//b.db", "./a//b.db"),
            ("sqlite:100%.db", "100%.db"),
        ] {
            assert_eq!(text.parse(), Ok(url(path)), "{text}");
        }
        for (text, part) in [
            ("sqlite://x.db", "//x.db"),
            ("sqlite://a/b.db?durability=full", "//a/b.db"),
            ("sqlite://", "sqlite://"),
            ("sqlite:///", "sqlite:///"),
            ("sqlite:/", "sqlite:/"),
            ("sqlite:folder/", "sqlite:folder/"),
            ("sqlite:////", "sqlite:////"),
            ("sqlite:a?b.db", "b.db"),
            ("sqlite::memory:", ":memory:"),
            ("sqlite::memory:?durability=full", ":memory:"),
        ] {
            assert_eq!(text.parse::<StoreUrl>().expect_err(text).value(), part, "{text}");
        }
    }

    #[cfg(feature = "dynamodb")]
    #[test]
    fn a_dynamodb_address_names_a_table() {
        let url = "dynamodb:my-app?region=eu-west-1&endpoint=http://localhost:8000";
        let address = DynamoAddress {
            table: "my-app".to_owned(),
            region: Some("eu-west-1".to_owned()),
            endpoint: Some("http://localhost:8000".to_owned()),
        };
        assert_eq!(url.parse(), Ok(StoreUrl::Dynamodb(address)));
        for (bad, part) in [
            ("dynamodb:ab", "ab"),
            ("dynamodb:a b c", "a b c"),
            ("dynamodb:my-app?region=", "region="),
            ("dynamodb:my-app?region=not a region", "region=not a region"),
            ("dynamodb:my-app?endpoint=http://a b", "endpoint=http://a b"),
            ("dynamodb:my-app?endpoint=localhost", "endpoint=localhost"),
            ("dynamodb:my-app?region=a&colour=red", "colour=red"),
        ] {
            assert_eq!(bad.parse::<StoreUrl>().expect_err(bad).value(), part, "{bad}");
        }
    }
}
