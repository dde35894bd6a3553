//! Deletes a stack.

use crate::cloud::{StackEvent, StackState};
use crate::deploy::{DeployError, Deployer, Wait, check_maker, failed};
use crate::follow::Progress;

/// The outcome of a deletion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// The stack no longer exists.
    Gone {
        /// Type and name of each resource that was kept.
        kept: Vec<(String, String)>,
    },
    /// The deletion has started, and nobody waits for it.
    Started,
}

impl Deployer {
    /// The stack of that name, if this program created it.
    ///
    /// # Errors
    ///
    /// [`DeployError::NoStack`], [`DeployError::NotOurs`], an error of AWS.
    pub async fn ours(&self, name: &str) -> Result<StackState, DeployError> {
        let state = self.cloud().stack(name).await?;
        let state = state.ok_or_else(|| DeployError::NoStack { stack: name.to_owned() })?;
        check_maker(&state)?;
        Ok(state)
    }

    /// Deletes a stack. It empties the bucket with the aggregator's code first. The outcome names
    /// the buckets and tables that were kept.
    ///
    /// # Errors
    ///
    /// [`DeployError`]. Deleting again does the rest.
    pub async fn delete(
        &self,
        state: &StackState,
        wait: Wait,
        progress: &mut dyn Progress,
    ) -> Result<Deleted, DeployError> {
        if state.parameters.get("EnableDeletionProtection").is_some_and(|on| on == "true") {
            return Err(DeployError::Stuck {
                stack: state.name.clone(),
                status: "protected against deletion".to_owned(),
                hint: "deploy it without --enable-deletion-protection first".to_owned(),
            });
        }
        if let Some(bucket) = state.output("CodeBucketName") {
            progress.step("emptying the bucket of the aggregator's code");
            self.cloud().empty_bucket(bucket).await?;
        }
        let follower = self.follower();
        let mark = follower.mark(&state.id).await?;
        progress.step(&format!("deleting stack {}", state.name));
        self.cloud().delete(&state.id).await?;
        if wait == Wait::No {
            return Ok(Deleted::Started);
        }
        let ended = follower.follow(&state.id, mark, progress).await?;
        match ended.state {
            Some(state) if state.status.as_str() != "DELETE_COMPLETE" => {
                Err(failed(&state, &ended.events))
            }
            _ => Ok(Deleted::Gone { kept: kept(state, &ended.events) }),
        }
    }
}

/// The resources that CloudFormation skipped, and the archive, which is always kept.
fn kept(state: &StackState, events: &[StackEvent]) -> Vec<(String, String)> {
    let skipped = events.iter().filter(|event| {
        event.status.as_str() == "DELETE_SKIPPED" && event.kind != "AWS::S3::BucketPolicy"
    });
    let mut kept: Vec<(String, String)> =
        skipped.map(|event| (event.kind.clone(), event.physical_id.clone())).collect();
    if let Some(bucket) = state.output("ArchiveBucketName")
        && !kept.iter().any(|(_, name)| name == bucket)
    {
        kept.push(("AWS::S3::Bucket".to_owned(), bucket.to_owned()));
    }
    kept
}
