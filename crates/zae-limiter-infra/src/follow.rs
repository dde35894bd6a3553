//! Watching a stack change, and finding out why it did not.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::Clock;

use crate::cloud::{Cloud, CloudError, CloudErrorKind, StackEvent, StackState, Status};

/// How long between two looks, and how often at most: two hours.
const BETWEEN_LOOKS: Duration = Duration::from_secs(2);
const LOOKS_MAX: u32 = 3_600;
/// How often in a row AWS may fail to answer a look.
const UNANSWERED_MAX: u32 = 5;

/// Somebody who is told what happens.
pub trait Progress: Send {
    /// Something happened to a part of the stack.
    fn event(&mut self, event: &StackEvent);
    /// Something else begins.
    fn step(&mut self, what: &str);
}

/// Nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn event(&mut self, _: &StackEvent) {}
    fn step(&mut self, _: &str) {}
}

/// How a change of a stack ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The stack, if there still is one.
    pub(crate) state: Option<StackState>,
    /// Everything that happened, oldest first.
    pub(crate) events: Vec<StackEvent>,
}

/// Watches stacks.
#[derive(Clone, Debug)]
pub(crate) struct Follower<'a> {
    pub(crate) cloud: &'a dyn Cloud,
    pub(crate) clock: &'a Arc<dyn Clock>,
}

impl Follower<'_> {
    /// The last event so far, to follow from there.
    pub(crate) async fn mark(&self, stack: &str) -> Result<Option<String>, CloudError> {
        let events = self.cloud.events(stack, None).await?;
        Ok(events.last().map(|event| event.id.clone()))
    }

    /// Watches until nothing is under way any more. `stack` is an ARN where the stack may go away.
    pub(crate) async fn follow(
        &self,
        stack: &str,
        mark: Option<String>,
        progress: &mut dyn Progress,
    ) -> Result<Ended, CloudError> {
        let (mut mark, mut events, mut unanswered) = (mark, Vec::new(), 0);
        for _ in 0..LOOKS_MAX {
            match self.look(stack, mark.as_deref()).await {
                Ok((new, state)) => {
                    unanswered = 0;
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
                    unanswered += 1;
                    if unanswered == UNANSWERED_MAX {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
            self.clock.sleep(BETWEEN_LOOKS).await;
        }
        let message =
            format!("stack {stack} is still changing; run the command again to follow it");
        Err(CloudError::new(CloudErrorKind::Unavailable, message))
    }

    async fn look(
        &self,
        stack: &str,
        mark: Option<&str>,
    ) -> Result<(Vec<StackEvent>, Option<StackState>), CloudError> {
        // In this order: what happens in between is seen by the next look, or comes with the end.
        let state = self.cloud.stack(stack).await?;
        let events = match self.cloud.events(stack, mark).await {
            // A deleted stack may take its events along.
            Err(error) if error.kind == CloudErrorKind::NotFound => Vec::new(),
            events => events?,
        };
        Ok((events, state))
    }
}

/// Why a stack could not be changed: the first part that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// The part.
    pub resource: String,
    /// What kind it is.
    pub kind: String,
    /// What AWS says about it.
    pub reason: String,
}

impl Cause {
    /// The first failure that is not a consequence of another one.
    pub fn first(events: &[StackEvent]) -> Option<Self> {
        let failed = |event: &&StackEvent| {
            event.status.as_str().ends_with("_FAILED") && !is_consequence(event)
        };
        let part = events.iter().filter(|event| !event.is_stack()).find(failed);
        let event = part.or_else(|| {
            let is_told = |event: &&StackEvent| event.status.is_bad() && event.reason.is_some();
            events.iter().find(is_told)
        })?;
        Some(Self {
            resource: event.resource.clone(),
            kind: event.kind.clone(),
            reason: event.reason.clone().unwrap_or_else(|| "AWS gives no reason".to_owned()),
        })
    }

    /// What to do about it, where that can be told from what AWS says.
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
                "the logs of an earlier function of that name are still there; delete the log group"
                    .to_owned(),
            );
        }
        if has("deleted recently") || has("queuedeletedrecently") {
            return Some("a queue's name is free again a minute after it was deleted".to_owned());
        }
        if has("already exists") {
            return Some(
                "something of that name exists outside this stack; delete it, choose another \
                 --name, or other names with --role-name-format and --policy-name-format"
                    .to_owned(),
            );
        }
        if has("not authorized") || has("accessdenied") || has("access denied") {
            let iam = self.kind.starts_with("AWS::IAM");
            let hint = if iam {
                "whoever deploys may not make policies and roles; ask for the permission, or use \
                 --no-iam with --aggregator-role-arn or --no-aggregator"
            } else {
                "whoever deploys needs that permission"
            };
            return Some(hint.to_owned());
        }
        if has("deletion protection") {
            return Some("deploy without --enable-deletion-protection first".to_owned());
        }
        if has("not empty") {
            return Some("empty the bucket, or leave it out of the deletion by hand".to_owned());
        }
        None
    }
}

/// CloudFormation takes back what it had begun when another part fails, and calls that a failure too.
fn is_consequence(event: &StackEvent) -> bool {
    let reason = event.reason.as_deref().unwrap_or_default().to_lowercase();
    reason.contains("cancelled") || reason.contains("canceled")
}

/// Whether a stack's end is a good one.
pub(crate) fn is_good(status: Option<&Status>) -> bool {
    status.is_some_and(Status::is_good)
}
