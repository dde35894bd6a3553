//! The rate limiter in an AWS account: the stack, its permissions, its upgrades.
//!
//! [`StackOptions`] say what is wanted and check it before anything is sent; what they come to is a
//! [`StackPlan`]: the [template](TEMPLATE), its parameters and tags. [`Deployer`] makes a stack what a
//! plan says, with the aggregator as a [`Package`], over the seam [`Cloud`]. Only the adapter over the
//! SDK, behind the feature `aws`, knows AWS's crates.

#[cfg(feature = "aws")]
pub mod aws;
mod cloud;
mod delete;
mod deploy;
mod follow;
pub mod migrate;
mod names;
mod options;
mod package;
mod plan;
pub mod records;
mod template;
pub mod versions;

pub use cloud::{
    Cloud, CloudError, CloudErrorKind, Maker, StackEvent, StackState, Status, TableFigures, Update,
};
pub use delete::Deleted;
pub use deploy::{DeployError, Deployed, Deployer, Wait};
pub use follow::{Cause, Progress, Silent};
pub use names::{InvalidOption, NameFormat};
pub use options::{Architecture, Iam, ResourceIndex, RetainTable, StackOptions};
pub use package::{GLIBC_MAX, Glibc, Package, PackageError};
pub use plan::{StackPlan, tag};
pub use template::{TEMPLATE, template};
pub use zae_limiter_schema::TableError;
