//! The rate limiter in an AWS account.
//!
//! [`StackOptions`] say what is wanted and check it before anything is sent; what they come to is a
//! [`StackPlan`]: the [template](TEMPLATE), its parameters and tags. Nothing in this part knows AWS's
//! SDK.

mod names;
mod options;
mod plan;
mod template;

pub use names::{InvalidOption, NameFormat};
pub use options::{Architecture, Iam, ResourceIndex, RetainTable, StackOptions};
pub use plan::{StackPlan, tag};
pub use template::{TEMPLATE, template};
