//! Deploys, upgrades and deletes the limiter's stack in an AWS account.
//!
//! [`StackOptions`] checks the options of a stack and turns them into a [`StackPlan`]: the
//! [template](TEMPLATE), its parameters and its tags. [`Deployer`] creates or updates a stack to
//! match a plan, and uploads the aggregator as a [`Package`]. It calls AWS through the trait
//! [`Cloud`]. Only the implementation of that trait behind the feature `aws` uses AWS's crates.

#[cfg(feature = "aws")]
pub mod aws;
mod cloud;
mod delete;
mod deploy;
mod find;
mod follow;
pub mod migrate;
mod names;
mod options;
mod package;
mod plan;
pub mod records;
mod release;
mod template;
pub mod versions;

pub use cloud::{
    Cloud, CloudError, CloudErrorKind, Maker, StackEvent, StackState, Status, TableFigures, Update,
};
pub use delete::Deleted;
pub use deploy::{DeployError, Deployed, Deployer, Wait};
pub use find::{AGGREGATOR_VAR, NoAggregator, Search, Unfit};
pub use follow::{Cause, Progress, Silent};
pub use names::{InvalidOption, NameFormat};
pub use options::{Architecture, Iam, ResourceIndex, RetainTable, StackOptions};
pub use package::{GLIBC_MAX, Glibc, NotLinux, Package, PackageError, is_zip};
pub use plan::{StackPlan, tag};
pub use release::{
    CHECKSUMS, ChecksumError, Checksums, RELEASE_MARK, function_file, release_of, url,
};
pub use template::{TEMPLATE, template};
pub use zae_limiter_schema::{TableError, TableErrorKind};
