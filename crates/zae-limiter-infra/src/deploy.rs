//! Putting a stack into an account, and changing it.
//!
//! The aggregator's code has to be in the stack's own bucket before its function can be made, so a
//! first deployment goes in two steps: everything but the function, then the upload, then the
//! function. Each step can be repeated: whoever was interrupted deploys again, and the rest is done.

use std::sync::Arc;

use zae_limiter_core::Clock;

use crate::cloud::{Cloud, CloudError, Maker, StackState, Update};
use crate::follow::{Cause, Follower, Progress, is_good};
use crate::package::Package;
use crate::plan::StackPlan;
use crate::versions::{Verdict, Versions};

/// Whether the command ends when the change is under way, or when it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// When it is done.
    #[default]
    UntilDone,
    /// When it is under way.
    No,
}

/// What a deployment came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deployed {
    /// There was none; now there is.
    Created(StackState),
    /// It was changed.
    Updated(StackState),
    /// It was as it should be.
    Unchanged(StackState),
    /// The change is under way. `unfinished` when there is more to do after it: deploy again.
    Started {
        /// The aggregator's function is still to be made.
        unfinished: bool,
    },
}

/// Why a stack is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum DeployError {
    /// AWS did not do what it was asked to do.
    #[error("{0}")]
    Cloud(#[from] CloudError),
    /// A stack of that name is not ours to change.
    #[error("{message}")]
    NotOurs {
        /// Whose it is.
        message: String,
        /// What to do.
        hint: String,
    },
    /// The change failed.
    #[error("stack {stack} is {status}")]
    Failed {
        /// Which stack.
        stack: String,
        /// How it is now.
        status: String,
        /// Why.
        cause: Option<Cause>,
    },
    /// There is no such stack.
    #[error("there is no stack {stack} in this account and region")]
    NoStack {
        /// What it would be called.
        stack: String,
    },
    /// The stack waits for somebody to repair it.
    #[error("stack {stack} is {status} and cannot be changed as it is")]
    Stuck {
        /// Which stack.
        stack: String,
        /// How it is.
        status: String,
        /// What to do.
        hint: String,
    },
}

/// Deploys stacks.
#[derive(Clone, Debug)]
pub struct Deployer {
    cloud: Arc<dyn Cloud>,
    clock: Arc<dyn Clock>,
    wait: Wait,
}

impl Deployer {
    /// One that looks at the stack in the clock's time.
    pub fn new(cloud: Arc<dyn Cloud>, clock: Arc<dyn Clock>) -> Self {
        Self { cloud, clock, wait: Wait::default() }
    }

    /// Whether to wait until the change is done.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }

    /// Makes the stack what the plan says: creates it, changes it, or leaves it as it is. `code` is
    /// the aggregator, where the plan has one; without it a stack keeps the one it has, and a new stack
    /// has none yet.
    ///
    /// # Errors
    ///
    /// [`DeployError`]; what was done before stays, and is not done again by the next try.
    pub async fn deploy(
        &self,
        plan: &StackPlan,
        code: Option<&Package>,
        progress: &mut dyn Progress,
    ) -> Result<Deployed, DeployError> {
        let code = code.filter(|_| plan.has_aggregator);
        let name = plan.name.as_str();
        match self.settled(name, progress).await? {
            None => self.create(plan, code, progress).await,
            Some(state) if state.status.never_was() => {
                check_maker(&state)?;
                progress.step("an earlier attempt failed; clearing it away");
                self.clear(&state, progress).await?;
                self.create(plan, code, progress).await
            }
            Some(state) => {
                check_maker(&state)?;
                check_release(&state)?;
                check_usable(&state)?;
                check_same_index(&state, plan)?;
                self.change(plan, code, state, progress).await
            }
        }
    }

    /// The stack, once nothing is under way.
    async fn settled(
        &self,
        name: &str,
        progress: &mut dyn Progress,
    ) -> Result<Option<StackState>, DeployError> {
        let state = match self.cloud.stack(name).await? {
            Some(state) if state.status.is_under_way() => state,
            settled => return Ok(settled),
        };
        progress.step(&format!("stack {name} is {}; waiting for that to end", state.status));
        let follower = self.follower();
        let mark = follower.mark(&state.id).await?;
        let ended = follower.follow(&state.id, mark, progress).await?;
        Ok(ended.state.filter(|state| state.status.as_str() != "DELETE_COMPLETE"))
    }

    async fn clear(
        &self,
        state: &StackState,
        progress: &mut dyn Progress,
    ) -> Result<(), DeployError> {
        let follower = self.follower();
        let mark = follower.mark(&state.id).await?;
        self.cloud.delete(&state.id).await?;
        let ended = follower.follow(&state.id, mark, progress).await?;
        match ended.state {
            Some(state) if state.status.as_str() != "DELETE_COMPLETE" => {
                Err(failed(&state, &ended.events))
            }
            _ => Ok(()),
        }
    }

    async fn create(
        &self,
        plan: &StackPlan,
        code: Option<&Package>,
        progress: &mut dyn Progress,
    ) -> Result<Deployed, DeployError> {
        progress.step(&format!("creating stack {}", plan.name));
        let id = self.cloud.create(plan).await?;
        if self.wait == Wait::No {
            return Ok(Deployed::Started { unfinished: code.is_some() });
        }
        let state = self.until_good(&id, None, progress).await?;
        let Some(code) = code else { return Ok(Deployed::Created(state)) };
        match self.add_code(plan, code, &state, progress).await? {
            Deployed::Updated(state) | Deployed::Unchanged(state) => Ok(Deployed::Created(state)),
            other => Ok(other),
        }
    }

    async fn change(
        &self,
        plan: &StackPlan,
        code: Option<&Package>,
        state: StackState,
        progress: &mut dyn Progress,
    ) -> Result<Deployed, DeployError> {
        let Some(code) = code else {
            let mut plan = plan.clone();
            if let Some(key) = state.parameters.get(StackPlan::CODE_KEY)
                && plan.has_aggregator
            {
                plan.parameters.insert(StackPlan::CODE_KEY.to_owned(), key.clone());
            }
            return self.update(&plan, &state, progress).await;
        };
        if state.output("CodeBucketName").is_some() {
            return self.add_code(plan, code, &state, progress).await;
        }
        // The aggregator is new to this stack: its bucket comes first.
        match self.update(plan, &state, progress).await? {
            Deployed::Updated(state) | Deployed::Unchanged(state) => {
                self.add_code(plan, code, &state, progress).await
            }
            _ => Ok(Deployed::Started { unfinished: true }),
        }
    }

    /// Uploads the code where it is not there yet, and makes the stack what the plan says, with the
    /// function.
    async fn add_code(
        &self,
        plan: &StackPlan,
        code: &Package,
        state: &StackState,
        progress: &mut dyn Progress,
    ) -> Result<Deployed, DeployError> {
        let Some(bucket) = state.output("CodeBucketName") else {
            return Err(DeployError::Stuck {
                stack: state.name.clone(),
                status: state.status.to_string(),
                hint: "it has no bucket for the aggregator's code; deploy again".to_owned(),
            });
        };
        let key = code.key();
        if !self.cloud.has_object(bucket, &key).await? {
            progress.step(&format!("uploading the aggregator, {}", code.size_text()));
            self.cloud.put_object(bucket, &key, code.zip().to_vec()).await?;
        }
        let mut plan = plan.clone();
        plan.parameters.insert(StackPlan::CODE_KEY.to_owned(), key);
        self.update(&plan, state, progress).await
    }

    async fn update(
        &self,
        plan: &StackPlan,
        state: &StackState,
        progress: &mut dyn Progress,
    ) -> Result<Deployed, DeployError> {
        let mark = self.follower().mark(&state.id).await?;
        match self.cloud.update(plan).await? {
            Update::Unchanged => return Ok(Deployed::Unchanged(state.clone())),
            Update::Started if self.wait == Wait::No => {
                return Ok(Deployed::Started { unfinished: false });
            }
            Update::Started => {}
        }
        progress.step(&format!("changing stack {}", plan.name));
        let state = self.until_good(&state.id, mark, progress).await?;
        Ok(Deployed::Updated(state))
    }

    async fn until_good(
        &self,
        id: &str,
        mark: Option<String>,
        progress: &mut dyn Progress,
    ) -> Result<StackState, DeployError> {
        let ended = self.follower().follow(id, mark, progress).await?;
        match ended.state {
            Some(state) if is_good(Some(&state.status)) => Ok(state),
            Some(state) => Err(failed(&state, &ended.events)),
            None => Err(DeployError::Failed {
                stack: id.to_owned(),
                status: "deleted".to_owned(),
                cause: Cause::first(&ended.events),
            }),
        }
    }

    pub(crate) fn follower(&self) -> Follower<'_> {
        Follower { cloud: &*self.cloud, clock: &self.clock }
    }

    pub(crate) fn cloud(&self) -> &dyn Cloud {
        &*self.cloud
    }
}

pub(crate) fn failed(state: &StackState, events: &[crate::cloud::StackEvent]) -> DeployError {
    DeployError::Failed {
        stack: state.name.clone(),
        status: state.status.to_string(),
        cause: Cause::first(events),
    }
}

/// Refuses a stack that another program made.
pub(crate) fn check_maker(state: &StackState) -> Result<(), DeployError> {
    let name = &state.name;
    let (message, hint) = match state.maker() {
        Maker::Us => return Ok(()),
        Maker::Python => (
            format!("stack {name} was made by the Python client, from another template"),
            format!(
                "its table can be used as it is, with --name {name}; change and delete the stack \
                 with the program that made it"
            ),
        ),
        Maker::Other => (
            format!("there is a stack {name} that is not a limiter's"),
            "choose another --name".to_owned(),
        ),
    };
    Err(DeployError::NotOurs { message, hint })
}

/// Refuses a stack of a later release.
fn check_release(state: &StackState) -> Result<(), DeployError> {
    match Versions::of(Some(state), None).verdict() {
        Verdict::ProgramTooOld(what) => Err(DeployError::Stuck {
            stack: state.name.clone(),
            status: format!("of a later release ({})", what.join(", ")),
            hint: "upgrade this program; stacks are never downgraded".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Refuses to change what an index holds: DynamoDB cannot, and would leave the stack half changed.
fn check_same_index(state: &StackState, plan: &StackPlan) -> Result<(), DeployError> {
    let (there, wanted) = (state.parameters.get(PROJECTION), plan.parameters.get(PROJECTION));
    if there == wanted || there.is_none() || wanted.is_none() {
        return Ok(());
    }
    let is = there.map_or("", String::as_str).to_lowercase().replace('_', "-");
    Err(DeployError::Stuck {
        stack: state.name.clone(),
        status: format!("deployed with --gsi2-projection {is}"),
        hint: "what an index holds cannot be changed; keep it, or deploy another stack".to_owned(),
    })
}

/// The parameter that says what the index by resource holds.
const PROJECTION: &str = "ResourceIndexProjection";

fn check_usable(state: &StackState) -> Result<(), DeployError> {
    if state.status.can_be_updated() {
        return Ok(());
    }
    let hint = match state.status.as_str() {
        "UPDATE_ROLLBACK_FAILED" => {
            "let CloudFormation finish: aws cloudformation continue-update-rollback --stack-name "
                .to_owned()
                + &state.name
        }
        "REVIEW_IN_PROGRESS" => {
            "somebody has prepared a change set for it; execute or delete that".to_owned()
        }
        _ => format!("delete it: zae-limiter delete --name {}", state.name),
    };
    Err(DeployError::Stuck { stack: state.name.clone(), status: state.status.to_string(), hint })
}
