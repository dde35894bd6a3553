//! Deploying the stack of a limiter.

use std::sync::Arc;
use std::thread;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use zae_limiter_core::{Builder, Clock, Error, RateLimiter, SystemClock};
use zae_limiter_dynamodb::aws::{AwsTable, DynamoAddress, LazyTable};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_infra::aws::AwsCloud;
use zae_limiter_infra::{
    DeployError, Deployer, InvalidOption, NoAggregator, Package, Search, Silent, StackOptions,
    TableError, records,
};

/// Why [`ensure_stack`] failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum StackError {
    /// An option is invalid; nothing was sent.
    Invalid(InvalidOption),
    /// No executable on this machine can be the aggregator; nothing was changed.
    NoAggregator(NoAggregator),
    /// The stack could not be deployed.
    Deploy(DeployError),
    /// The stack exists, but writing the version record to its table failed.
    Table(TableError),
    /// The stack exists, but storing the retention of audit events failed.
    Limiter(Error),
}

impl std::fmt::Display for StackError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Invalid(error) => error.fmt(f),
            Self::NoAggregator(error) => write!(f, "{error}; {}", error.hint()),
            Self::Deploy(DeployError::Failed { cause: Some(cause), stack, status }) => {
                write!(f, "stack {stack} is {status}: {}: {}", cause.resource, cause.reason)
            }
            Self::Deploy(error) => error.fmt(f),
            Self::Table(error) => error.fmt(f),
            Self::Limiter(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StackError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Invalid(_) | Self::NoAggregator(_) => None,
            Self::Deploy(error) => std::error::Error::source(error),
            Self::Table(error) => std::error::Error::source(error),
            Self::Limiter(error) => std::error::Error::source(error),
        }
    }
}

/// Creates or updates the stack that the options describe, and returns a builder for a limiter on it. A stack that
/// matches the options stays unchanged. The options' name is the name of the table; `address.table` is ignored.
///
/// It also runs without a tokio runtime, as in `blocking::wait`: then on its own thread, which continues if the future
/// is dropped.
///
/// `aggregator` is the packed program `zae-limiter`. With `None`, a stack keeps an aggregator of this release. For any
/// other stack the call looks for the program, packs and deploys it:
///
/// 1. the file named by [`StackOptions::aggregator_file`], else
/// 2. the file named by the environment variable `ZAEL_AGGREGATOR`, else
/// 3. `zae-limiter` in the folder of this program, else in the folders of `PATH`.
///
/// The program must be a Linux executable of this release that Lambda can run. If there is none, the call fails with
/// [`StackError::NoAggregator`] and changes nothing. [`StackOptions::no_aggregator`] deploys a stack without one.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use zae_limiter::dynamodb::aws::DynamoAddress;
/// use zae_limiter::infra::StackOptions;
///
/// let options = StackOptions::new("my-app".parse()?);
/// let address = DynamoAddress { table: String::new(), region: None, endpoint: None };
/// let limiter = zae_limiter::ensure_stack(&options, &address, None).await?.open().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`StackError`]. Completed steps stay, and the next call skips them.
pub async fn ensure_stack(
    options: &StackOptions,
    address: &DynamoAddress,
    aggregator: Option<&Package>,
) -> Result<Builder, StackError> {
    let (options, address) = (options.clone(), address.clone());
    if Handle::try_current().is_ok() {
        return ensure(options, address, aggregator).await;
    }
    let aggregator = aggregator.cloned();
    on_a_thread(async move { ensure(options, address, aggregator.as_ref()).await }).await
}

/// Runs work that needs a tokio runtime for a caller that has none.
async fn on_a_thread<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    let (done, result) = oneshot::channel();
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        // The caller may have dropped its future.
        let _ = done.send(runtime.expect("a runtime can be built").block_on(work));
    };
    let thread = thread::Builder::new().name("zae-limiter-stack".to_owned()).spawn(run);
    let thread = thread.expect("a thread can be started");
    match result.await {
        Ok(result) => result,
        // The thread ended without a result: it panicked.
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("a thread that ends without a panic has sent its result"),
        },
    }
}

async fn ensure(
    mut options: StackOptions,
    address: DynamoAddress,
    aggregator: Option<&Package>,
) -> Result<Builder, StackError> {
    if let Some(package) = aggregator {
        options = options.architecture(package.architecture());
    }
    // Check all options before the first call to AWS.
    options.plan().map_err(StackError::Invalid)?;
    let address = DynamoAddress { table: options.name().to_string(), ..address };
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let cloud = AwsCloud::connect(&address).await;
    let cloud = cloud.map_err(|error| StackError::Deploy(DeployError::Cloud(error)))?;
    let deployer = Deployer::new(Arc::new(cloud), Arc::clone(&clock));
    let found = match aggregator {
        Some(_) => None,
        None => find_aggregator(&options, &deployer).await?,
    };
    if let Some(package) = &found {
        options = options.architecture(package.architecture());
    }
    let plan = options.plan().map_err(StackError::Invalid)?;
    let aggregator = aggregator.or(found.as_ref());
    deployer.deploy(&plan, aggregator, &mut Silent).await.map_err(StackError::Deploy)?;
    let table = AwsTable::new(address.client().await, &address.table, Arc::clone(&clock));
    records::ensure_version(&table, clock.now()).await.map_err(StackError::Table)?;
    let table = Arc::new(LazyTable::new(address));
    let store = DynamoStore::new(table, DynamoOptions::default());
    let limiter = RateLimiter::builder(store.clone()).open().await.map_err(StackError::Limiter)?;
    let stored = limiter.namespaces().set_audit_retention(options.audit_retention(), |_| {}).await;
    stored.map_err(StackError::Limiter)?;
    Ok(RateLimiter::builder(store))
}

/// Packs the program `zae-limiter` of this machine. `None` if the stack needs none.
async fn find_aggregator(
    options: &StackOptions,
    deployer: &Deployer,
) -> Result<Option<Package>, StackError> {
    if !options.has_aggregator() {
        return Ok(None);
    }
    let is_current = deployer.has_current_aggregator(options.name().as_str()).await;
    if is_current.map_err(StackError::Deploy)? {
        return Ok(None);
    }
    let search = Search::of_this_process(options.named_aggregator_file());
    let wanted = options.wanted_architecture();
    // Reading and compressing take a while.
    let packed = tokio::task::spawn_blocking(move || search.package(wanted)).await;
    let packed = packed.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    packed.map(Some).map_err(StackError::NoAggregator)
}
