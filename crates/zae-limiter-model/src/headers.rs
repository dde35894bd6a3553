//! Header fields as the types of the `http` crate.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{LimitStatus, http_fields};

/// The [`http_fields`] of a response that was admitted, typed.
pub fn headers(statuses: &[LimitStatus]) -> HeaderMap {
    header_map(http_fields(statuses))
}

pub(crate) fn header_map(fields: Vec<(&'static str, String)>) -> HeaderMap {
    let typed = fields.into_iter().map(|(name, value)| {
        let value = HeaderValue::try_from(value).expect("names of limits and numbers are ASCII");
        (HeaderName::from_static(name), value)
    });
    typed.collect()
}
