//! What the tests of the template share.

pub(crate) mod cfn;
pub(crate) mod fake;
pub(crate) mod iam;
