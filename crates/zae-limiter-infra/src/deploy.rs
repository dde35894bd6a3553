//! Creates and updates a stack.
//!
//! The aggregator's code must be in the stack's own bucket before CloudFormation can create the
//! function. So a first deployment updates the stack twice: it creates everything but the function,
//! uploads the code, and then adds the function. Every step can be repeated: after an interruption,
//! deploying again does the rest.

use std::sync::Arc;

use zae_limiter_core::Clock;

use crate::cloud::{Cloud, CloudError, Maker, StackState, Update};
use crate::follow::{Cause, Follower, Progress, Silent, is_good};
use crate::package::Package;
use crate::plan::StackPlan;
use crate::versions::{PROGRAM, Verdict, Versions};

/// When the call returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// When the change is complete.
    #[default]
    UntilDone,
    /// When the change has started.
    No,
}

/// The outcome of a deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deployed {
    /// The stack was created.
    Created(StackState),
    /// The stack was updated.
    Updated(StackState),
    /// There was nothing to change.
    Unchanged(StackState),
    /// The change has started, and nobody waits for it.
    Started {
        /// Whether a second deployment has to add the aggregator's function.
        unfinished: bool,
    },
}

/// Why a deployment or deletion failed.
#[derive(Debug, thiserror::Error)]
pub enum DeployError {
    /// A call to AWS failed.
    #[error("{0}")]
    Cloud(#[from] CloudError),
    /// Another program created the stack of that name.
    #[error("{message}")]
    NotOurs {
        /// Which program created it.
        message: String,
        /// What to do.
        hint: String,
    },
    /// CloudFormation could not complete the change.
    #[error("stack {stack} is {status}")]
    Failed {
        /// The stack's name.
        stack: String,
        /// The stack's status.
        status: String,
        /// The first resource that failed.
        cause: Option<Cause>,
    },
    /// The stack does not exist.
    #[error("there is no stack {stack} in this account and region")]
    NoStack {
        /// The stack's name.
        stack: String,
    },
    /// The stack cannot be changed in its present state.
    #[error("stack {stack} is {status} and cannot be changed as it is")]
    Stuck {
        /// The stack's name.
        stack: String,
        /// The stack's status, or another reason.
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
    /// A deployer that waits for a change until it is complete. The clock times its polls.
    pub fn new(cloud: Arc<dyn Cloud>, clock: Arc<dyn Clock>) -> Self {
        Self { cloud, clock, wait: Wait::default() }
    }

    /// Sets when [`deploy`](Self::deploy) returns.
    #[must_use]
    pub fn wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }

    /// Creates or updates the stack so that it matches the plan. `code` is the aggregator, if the
    /// plan has one. Without `code` an existing stack keeps its aggregator, and a new one has none.
    ///
    /// # Errors
    ///
    /// [`DeployError`]. Completed steps stay, and the next deployment skips them.
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
            Some(state) if state.status.is_failed_creation() => {
                check_maker(&state)?;
                progress.step("an earlier attempt failed; deleting what it left");
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

    /// Whether the stack has an aggregator of this release. Waits for a change in progress.
    ///
    /// # Errors
    ///
    /// [`DeployError::Cloud`].
    pub async fn has_current_aggregator(&self, name: &str) -> Result<bool, DeployError> {
        let Some(state) = self.settled(name, &mut Silent).await? else { return Ok(false) };
        let has_code = state.parameters.get(StackPlan::CODE_KEY).is_some_and(|key| !key.is_empty());
        let release = Versions::of(Some(&state), None).aggregator;
        let is_usable = !state.status.is_failed_creation();
        Ok(is_usable && has_code && release.as_deref() == Some(PROGRAM))
    }

    /// The stack, after any change in progress is complete.
    async fn settled(
        &self,
        name: &str,
        progress: &mut dyn Progress,
    ) -> Result<Option<StackState>, DeployError> {
        let state = match self.cloud.stack(name).await? {
            Some(state) if state.status.is_under_way() => state,
            settled => return Ok(settled),
        };
        progress.step(&format!("stack {name} is {}; waiting until that is complete", state.status));
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
            return self.update(&with_code_of(&state, plan), &state, progress).await;
        };
        if state.output("CodeBucketName").is_some() {
            return self.add_code(plan, code, &state, progress).await;
        }
        // The stack had no aggregator so far: the update creates the bucket for its code.
        match self.update(plan, &state, progress).await? {
            Deployed::Updated(state) | Deployed::Unchanged(state) => {
                self.add_code(plan, code, &state, progress).await
            }
            _ => Ok(Deployed::Started { unfinished: true }),
        }
    }

    /// Uploads the code unless the bucket has it, and updates the stack with the function.
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

/// The plan with the code that the stack has, and the processor that the code is built for.
fn with_code_of(state: &StackState, plan: &StackPlan) -> StackPlan {
    let mut plan = plan.clone();
    let has_code = state.parameters.get(StackPlan::CODE_KEY).is_some_and(|key| !key.is_empty());
    if plan.has_aggregator && has_code {
        for name in [StackPlan::CODE_KEY, StackPlan::ARCHITECTURE] {
            if let Some(value) = state.parameters.get(name) {
                plan.parameters.insert(name.to_owned(), value.clone());
            }
        }
    }
    plan
}

/// Fails for a stack that another program created.
pub(crate) fn check_maker(state: &StackState) -> Result<(), DeployError> {
    let name = &state.name;
    let (message, hint) = match state.maker() {
        Maker::Us => return Ok(()),
        Maker::OurTemplate => (
            format!("another tool created stack {name} from our template: it has none of our tags"),
            format!(
                "its table can be used as it is, with --name {name}; update and delete the stack \
                 with that tool"
            ),
        ),
        Maker::Python | Maker::EarlyPython => (
            format!("the Python client created stack {name}, from another template"),
            format!(
                "its table can be used as it is, with --name {name}; update and delete the stack \
                 with the Python client"
            ),
        ),
        Maker::Other => (
            format!("there is a stack {name} that is not a limiter's"),
            "choose another --name".to_owned(),
        ),
    };
    Err(DeployError::NotOurs { message, hint })
}

/// Fails for a stack of a later release.
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

/// Fails if the plan changes the projection of an index. DynamoDB cannot do that, and the update
/// would fail halfway.
fn check_same_index(state: &StackState, plan: &StackPlan) -> Result<(), DeployError> {
    let (there, wanted) = (state.parameters.get(PROJECTION), plan.parameters.get(PROJECTION));
    if there == wanted || there.is_none() || wanted.is_none() {
        return Ok(());
    }
    let is = there.map_or("", String::as_str).to_lowercase().replace('_', "-");
    Err(DeployError::Stuck {
        stack: state.name.clone(),
        status: format!("deployed with --gsi2-projection {is}"),
        hint: "an index's projection cannot be changed; keep it, or deploy another stack"
            .to_owned(),
    })
}

/// The parameter with the projection of the index by resource.
const PROJECTION: &str = "ResourceIndexProjection";

fn check_usable(state: &StackState) -> Result<(), DeployError> {
    if state.status.can_be_updated() {
        return Ok(());
    }
    let hint = match state.status.as_str() {
        "UPDATE_ROLLBACK_FAILED" => {
            "finish the rollback: aws cloudformation continue-update-rollback --stack-name "
                .to_owned()
                + &state.name
        }
        "REVIEW_IN_PROGRESS" => {
            "the stack has an unexecuted change set; execute or delete that".to_owned()
        }
        _ => format!("delete it: zae-limiter delete --name {}", state.name),
    };
    Err(DeployError::Stuck { stack: state.name.clone(), status: state.status.to_string(), hint })
}
