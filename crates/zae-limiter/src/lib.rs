#![doc = include_str!("../../../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "infra")]
mod stack;
mod url;

use std::sync::Arc;

pub use url::StoreUrl;
#[doc(inline)]
pub use zae_limiter_core::*;
#[cfg(feature = "dynamodb")]
#[doc(inline)]
pub use zae_limiter_dynamodb::{self as dynamodb, DynamoOptions, DynamoStore};
#[cfg(feature = "infra")]
#[doc(inline)]
pub use zae_limiter_infra as infra;
#[cfg(feature = "sqlite")]
#[doc(inline)]
pub use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

#[cfg(feature = "infra")]
pub use stack::{StackError, ensure_stack};

/// Opens the limiter of the namespace `default` on the store at `url`: see [`StoreUrl`].
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let limiter = zae_limiter::open("memory:").await?;
/// assert_eq!(limiter.namespace().as_str(), "default");
/// # Ok::<(), zae_limiter::Error>(())
/// # }).unwrap();
/// ```
///
/// # Errors
///
/// [`Error::Invalid`] for the address; [`Error::Store`] or [`Error::Unavailable`] when the store
/// cannot be opened.
pub async fn open(url: &str) -> Result<RateLimiter, Error> {
    builder(url)?.open().await
}

/// A builder for a limiter on the store at `url`: see [`StoreUrl`].
///
/// # Errors
///
/// [`Error::Invalid`] for the address; [`Error::Store`] or [`Error::Unavailable`] when the store
/// cannot be opened.
pub fn builder(url: &str) -> Result<Builder, Error> {
    Ok(RateLimiter::builder(open_store(url)?))
}

/// Opens the store at `url`: see [`StoreUrl`].
///
/// # Errors
///
/// [`Error::Invalid`] for the address; [`Error::Store`] or [`Error::Unavailable`] when the store
/// cannot be opened.
pub fn open_store(url: &str) -> Result<Arc<dyn Store>, Error> {
    url.parse::<StoreUrl>()?.open()
}

/// The Rust programs in the guides are run with the other doctests.
#[cfg(doctest)]
mod guides {
    #[doc = include_str!("../../../docs/configuration-levels.md")]
    mod configuration_levels {}
    #[doc = include_str!("../../../docs/getting-started.md")]
    mod getting_started {}
    #[doc = include_str!("../../../docs/hierarchies.md")]
    mod hierarchies {}
    #[doc = include_str!("../../../docs/limits-and-bursts.md")]
    mod limits_and_bursts {}
    #[doc = include_str!("../../../docs/llm-settling.md")]
    mod llm_settling {}
    #[doc = include_str!("../../../docs/unavailability.md")]
    mod unavailability {}
}
