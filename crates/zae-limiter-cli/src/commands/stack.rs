//! Shared code of the stack commands.

use std::sync::Arc;

use zae_limiter::dynamodb::aws::{AwsTable, DynamoAddress};
use zae_limiter_infra::aws::AwsCloud;
use zae_limiter_infra::{
    Cloud, CloudError, CloudErrorKind, DeployError, Deployer, InvalidOption, Progress, StackEvent,
    StackState, TableError, TableErrorKind, TableFigures,
};

use crate::columns::Cell;
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::{Look, Printer};

/// An AWS account and region.
pub(crate) struct Account {
    pub(crate) cloud: Arc<dyn Cloud>,
    pub(crate) deployer: Deployer,
}

/// Connects to the account and region of an address.
pub(crate) async fn connect(
    context: &Context,
    address: &DynamoAddress,
) -> Result<Account, Failure> {
    let limit = context.aws_timeout()?;
    let cloud = AwsCloud::connect_within(address, limit).await?;
    let cloud: Arc<dyn Cloud> = Arc::new(cloud);
    let deployer = Deployer::new(Arc::clone(&cloud), Arc::clone(&context.pace));
    Ok(Account { cloud, deployer })
}

/// A stack, or why there is none.
pub(crate) enum Found {
    Stack(StackState),
    Nothing,
    /// The endpoint has tables only.
    NoCloudFormation(CloudError),
}

impl Found {
    pub(crate) fn stack(&self) -> Option<&StackState> {
        match self {
            Self::Stack(state) => Some(state),
            Self::Nothing | Self::NoCloudFormation(_) => None,
        }
    }
}

/// The field `stack` at an endpoint with tables only.
pub(crate) fn missing_field(error: &CloudError) -> (&'static str, Cell) {
    ("stack", Cell::new(Look::Dim, format!("none: {error}")))
}

/// Looks for a stack, for commands that can do without one.
pub(crate) async fn find(account: &Account, name: &str) -> Result<Found, Failure> {
    match account.cloud.stack(name).await {
        Ok(Some(state)) => Ok(Found::Stack(state)),
        Ok(None) => Ok(Found::Nothing),
        Err(error) if error.kind == CloudErrorKind::NoService => Ok(Found::NoCloudFormation(error)),
        Err(error) => Err(error.into()),
    }
}

/// The figures of a table, if it exists.
pub(crate) async fn figures(
    account: &Account,
    name: &str,
) -> Result<Option<TableFigures>, Failure> {
    account.cloud.table(name).await.map_err(|error| match error.kind {
        CloudErrorKind::NoService => {
            Failure::from(error).hint("check the endpoint: it answers, but not as DynamoDB does")
        }
        _ => error.into(),
    })
}

/// The failure if a table does not exist. `hint` is for accounts with CloudFormation.
pub(crate) fn no_table(message: String, name: &str, found: &Found, hint: &str) -> Failure {
    let failure = Failure::new(ExitStatus::NotFound, message);
    match found {
        Found::NoCloudFormation(_) => failure.hint(format!(
            "check the name: this endpoint has no CloudFormation to create a table with; on this \
             machine: zae-limiter local up --name {name}"
        )),
        Found::Stack(_) | Found::Nothing => failure.hint(hint),
    }
}

/// The table of an address. Each of its calls has the same time limit as other calls to AWS.
pub(crate) async fn table(context: &Context, address: &DynamoAddress) -> Result<AwsTable, Failure> {
    let client = address.client_within(context.aws_timeout()?).await;
    Ok(AwsTable::new(client, &address.table, Arc::clone(&context.pace)))
}

/// The failure of a call to the table. `what` could not be done.
pub(crate) fn table_failure(what: &str, address: &DynamoAddress, error: &TableError) -> Failure {
    let place = match (&address.endpoint, &address.region) {
        (Some(url), _) => format!(" at {url}"),
        (None, Some(region)) => format!(" in {region}"),
        (None, None) => String::new(),
    };
    let message = format!("could not {what} of table {}{place}", address.table);
    Failure::new(status_of(error.kind), message).caused_by(error)
}

/// The exit status for a failed call to a table.
pub(crate) fn status_of(kind: TableErrorKind) -> ExitStatus {
    match kind {
        TableErrorKind::NoTable => ExitStatus::NotFound,
        TableErrorKind::Unavailable
        | TableErrorKind::Throttled
        | TableErrorKind::PartitionThrottled
        | TableErrorKind::Conflict => ExitStatus::Unavailable,
        TableErrorKind::Denied | TableErrorKind::Incompatible | TableErrorKind::Rejected => {
            ExitStatus::Error
        }
    }
}

/// Prints the events of a stack: a line for each finished or failed resource, and a progress line
/// for the current one.
pub(crate) struct ProgressPrinter<'a> {
    printer: &'a mut Printer,
    done: u32,
}

impl<'a> ProgressPrinter<'a> {
    pub(crate) fn new(printer: &'a mut Printer) -> Self {
        Self { printer, done: 0 }
    }

    /// As [`new`](Self::new), with a progress line until the first event.
    pub(crate) fn of_stack(printer: &'a mut Printer, name: &str) -> Self {
        printer.progress(format!("waiting for CloudFormation: stack {name}"));
        Self::new(printer)
    }
}

impl Progress for ProgressPrinter<'_> {
    fn event(&mut self, event: &StackEvent) {
        let status = event.status.as_str().to_lowercase().replace('_', " ");
        let line = format!("  {status:<20} {:<28} {}", short(&event.kind), event.resource);
        if event.is_stack() {
            self.printer.progress(format!("stack is {status}"));
        } else if event.status.is_under_way() {
            self.printer.progress(format!("{} done; {}", self.done, line.trim_start()));
        } else {
            self.done += 1;
            self.printer.say_unless_json(line);
            if let Some(reason) = event.reason.as_ref().filter(|_| event.status.is_bad()) {
                self.printer.say_unless_json(format!("    {reason}"));
            }
        }
    }

    fn step(&mut self, what: &str) {
        self.printer.say_unless_json(what);
    }
}

/// Strips the prefix `AWS::` of a resource type.
fn short(kind: &str) -> &str {
    kind.strip_prefix("AWS::").unwrap_or(kind)
}

impl From<CloudError> for Failure {
    fn from(error: CloudError) -> Self {
        let status = match error.kind {
            CloudErrorKind::Unavailable => ExitStatus::Unavailable,
            CloudErrorKind::NotFound | CloudErrorKind::NoService => ExitStatus::NotFound,
            CloudErrorKind::Denied | CloudErrorKind::Rejected => ExitStatus::Error,
        };
        let failure = Self::new(status, error.message.clone());
        match std::error::Error::source(&error) {
            // Otherwise the message quotes AWS already.
            Some(source) if error.kind == CloudErrorKind::Unavailable => failure.caused_by(source),
            _ if error.kind == CloudErrorKind::NoService => failure.hint(
                "some endpoints have tables only, as that of `local up`; zae-limiter status shows a \
                 table",
            ),
            _ => failure,
        }
    }
}

impl From<InvalidOption> for Failure {
    fn from(error: InvalidOption) -> Self {
        let InvalidOption { option, value, rule } = error;
        let failure = Self::usage(format!("invalid value {value:?} for --{option}: it {rule}"));
        failure.hint("nothing was sent to AWS")
    }
}

impl From<DeployError> for Failure {
    fn from(error: DeployError) -> Self {
        let message = error.to_string();
        match error {
            DeployError::Cloud(error) => error.into(),
            DeployError::NotOurs { hint, .. } | DeployError::Stuck { hint, .. } => {
                Self::new(ExitStatus::Error, message).hint(hint)
            }
            DeployError::NoStack { .. } => Self::new(ExitStatus::NotFound, message)
                .hint("zae-limiter list shows existing stacks; zae-limiter deploy creates one"),
            DeployError::Failed { cause, .. } => {
                let mut failure = Self::new(ExitStatus::Error, message);
                if let Some(cause) = cause {
                    let what = format!("{} ({})", cause.resource, short(&cause.kind));
                    failure.causes.push(format!("{what}: {}", cause.reason));
                    failure.hint = cause.hint();
                }
                failure
            }
        }
    }
}
