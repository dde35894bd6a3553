//! Helpers that the tests share.

pub(crate) mod cfn;
pub(crate) mod fake;
pub(crate) mod iam;
