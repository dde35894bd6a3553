//! Follows a change of a stack to its end, and finds the cause of a failure.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::Clock;

use crate::cloud::{Cloud, CloudError, CloudErrorKind, StackEvent, StackState, Status};

/// The pause between two polls of a stack.
const POLL_EVERY: Duration = Duration::from_secs(2);
/// The most polls of one change: two hours.
const POLLS_MAX: u32 = 3_600;
/// How many polls in a row may fail because AWS is unavailable.
const UNAVAILABLE_MAX: u32 = 5;

/// Receives the progress of a deployment or deletion.
pub trait Progress: Send {
    /// Called for each event of the stack or one of its resources.
    fn event(&mut self, event: &StackEvent);
    /// Called before each step, with a sentence that describes it.
    fn step(&mut self, what: &str);
}

/// Ignores all progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&mut self, _: &StackEvent) {}
    fn step(&mut self, _: &str) {}
}

/// The end of a change.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The stack, if it still exists.
    pub(crate) state: Option<StackState>,
    /// All events of the change, oldest first.
    pub(crate) events: Vec<StackEvent>,
}

/// Polls a stack until its change is complete.
#[derive(Clone, Debug)]
pub(crate) struct Follower<'a> {
    pub(crate) cloud: &'a dyn Cloud,
    pub(crate) clock: &'a Arc<dyn Clock>,
}

impl Follower<'_> {
    /// The id of the last event so far, to follow from there.
    pub(crate) async fn mark(&self, stack: &str) -> Result<Option<String>, CloudError> {
        let events = self.cloud.events(stack, None).await?;
        Ok(events.last().map(|event| event.id.clone()))
    }

    /// Polls until no change is in progress. `stack` must be an ARN if the change may delete it.
    pub(crate) async fn follow(
        &self,
        stack: &str,
        mark: Option<String>,
        progress: &mut dyn Progress,
    ) -> Result<Ended, CloudError> {
        let (mut mark, mut events, mut unavailable) = (mark, Vec::new(), 0);
        for _ in 0..POLLS_MAX {
            match self.poll(stack, mark.as_deref()).await {
                Ok((new, state)) => {
                    unavailable = 0;
                    for event in &new {
                        progress.event(event);
                    }
                    mark = new.last().map(|event| event.id.clone()).or(mark);
                    events.extend(new);
                    if !state.as_ref().is_some_and(|state| state.status.is_under_way()) {
                        return Ok(Ended { state, events });
                    }
                }
                Err(error) if error.kind == CloudErrorKind::Unavailable => {
                    unavailable += 1;
                    if unavailable == UNAVAILABLE_MAX {
                        return Err(error);
                    }
                    progress.step(&format!("{error}; trying again"));
                }
                Err(error) => return Err(error),
            }
            self.clock.sleep(POLL_EVERY).await;
        }
        let message =
            format!("stack {stack} is still changing; run the command again to follow it");
        Err(CloudError::new(CloudErrorKind::Unavailable, message))
    }

    async fn poll(
        &self,
        stack: &str,
        mark: Option<&str>,
    ) -> Result<(Vec<StackEvent>, Option<StackState>), CloudError> {
        // The state first: then no event before a final state is missed.
        let state = self.cloud.stack(stack).await?;
        let events = match self.cloud.events(stack, mark).await {
            // The events of a deleted stack may be deleted as well.
            Err(error) if error.kind == CloudErrorKind::NotFound => Vec::new(),
            events => events?,
        };
        Ok((events, state))
    }
}

/// Why a stack could not be changed: the first resource that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The resource's name in the template.
    pub resource: String,
    /// The resource's type, for example `AWS::DynamoDB::Table`.
    pub kind: String,
    /// The reason that AWS gives.
    pub reason: String,
}

impl Cause {
    /// The first failure that is not a consequence of another one.
    pub fn first(events: &[StackEvent]) -> Option<Self> {
        let failed = |event: &&StackEvent| {
            event.status.as_str().ends_with("_FAILED") && !is_consequence(event)
        };
        let resource = events.iter().filter(|event| !event.is_stack()).find(failed);
        let event = resource.or_else(|| {
            let has_reason = |event: &&StackEvent| event.status.is_bad() && event.reason.is_some();
            events.iter().find(has_reason)
        })?;
        Some(Self {
            resource: event.resource.clone(),
            kind: event.kind.clone(),
            reason: event.reason.clone().unwrap_or_else(|| "AWS gives no reason".to_owned()),
        })
    }

    /// What to do about it, for the reasons that are recognised.
    pub fn hint(&self) -> Option<String> {
        let reason = self.reason.to_lowercase();
        let has = |text: &str| reason.contains(text);
        if has("already exists") && self.kind == "AWS::DynamoDB::Table" {
            return Some(
                "a table of that name exists outside this stack; choose another --name, or delete \
                 the table if it is not needed"
                    .to_owned(),
            );
        }
        if has("already exists") && self.kind == "AWS::Logs::LogGroup" {
            return Some(
                "an earlier function of that name has left its log group; delete the log group"
                    .to_owned(),
            );
        }
        if has("deleted recently") || has("queuedeletedrecently") {
            return Some(
                "wait a minute: AWS frees the name of a deleted queue after that".to_owned(),
            );
        }
        if has("already exists") {
            return Some(
                "a resource of that name exists outside this stack; delete it, choose another \
                 --name, or other names with --role-name-format and --policy-name-format"
                    .to_owned(),
            );
        }
        if has("not authorized") || has("accessdenied") || has("access denied") {
            let iam = self.kind.starts_with("AWS::IAM");
            let hint = if iam {
                "your credentials may not create policies and roles; ask for the permission, or \
                 use --no-iam with --aggregator-role-arn or --no-aggregator"
            } else {
                "your credentials lack that permission; ask for it"
            };
            return Some(hint.to_owned());
        }
        if has("deletion protection") {
            return Some("deploy without --enable-deletion-protection first".to_owned());
        }
        if has("not empty") {
            return Some("empty the bucket, then delete the stack again".to_owned());
        }
        None
    }
}

/// CloudFormation cancels other resources when one fails, and reports those as failed too.
fn is_consequence(event: &StackEvent) -> bool {
    let reason = event.reason.as_deref().unwrap_or_default().to_lowercase();
    reason.contains("cancelled") || reason.contains("canceled")
}

/// Whether the stack exists and its last change succeeded.
pub(crate) fn is_good(status: Option<&Status>) -> bool {
    status.is_some_and(Status::is_good)
}
