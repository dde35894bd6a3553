//! A fake AWS in memory, with failures on demand. It creates the resources of a template like
//! CloudFormation, one event per poll.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use zae_limiter_core::{BoxFuture, Clock, Timestamp};
use zae_limiter_infra::{
    Cloud, CloudError, CloudErrorKind, StackEvent, StackPlan, StackState, Status, TableFigures,
    Update,
};

use super::cfn::{Stack, text};

/// A clock whose waits end at once.
#[derive(Debug)]
pub(crate) struct NoWait;

impl Clock for NoWait {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(1_800_000_000_000)
    }

    fn sleep(&self, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

#[derive(Debug, Default)]
pub(crate) struct FakeCloud {
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    stacks: BTreeMap<String, FakeStack>,
    buckets: BTreeMap<String, BTreeSet<String>>,
    calls: Vec<String>,
    /// The next resource of that name fails, for that reason.
    fails: Option<(String, String)>,
    /// After the first number of polls, the second number of polls fail.
    failing_polls: (u32, u32),
    events: u64,
}

#[derive(Debug)]
struct FakeStack {
    state: StackState,
    template: String,
    resources: BTreeMap<String, String>,
    happened: Vec<StackEvent>,
    /// The events to come, each with the stack's status after it.
    coming: VecDeque<(StackEvent, Status)>,
}

impl FakeCloud {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap()
    }

    pub(crate) fn fail(&self, resource: &str, reason: &str) {
        self.lock().fails = Some((resource.to_owned(), reason.to_owned()));
    }

    /// After `after` polls, the next `polls` ones fail.
    pub(crate) fn fail_polls(&self, after: u32, polls: u32) {
        self.lock().failing_polls = (after, polls);
    }

    /// The calls so far, without polls. Empties the list.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().calls)
    }

    pub(crate) fn resources(&self, stack: &str) -> Vec<String> {
        let inside = self.lock();
        inside.stacks.get(stack).map_or(Vec::new(), |s| s.resources.keys().cloned().collect())
    }

    pub(crate) fn objects(&self, bucket: &str) -> Vec<String> {
        self.lock().buckets.get(bucket).into_iter().flatten().cloned().collect()
    }

    /// Adds a stack of another program.
    pub(crate) fn put_foreign(&self, name: &str, status: &str, tags: &[(&str, &str)]) {
        let tags = tags.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let state = StackState {
            name: name.to_owned(),
            id: format!("arn:aws:cloudformation:eu-west-1:123456789012:stack/{name}/1"),
            status: Status(status.to_owned()),
            reason: None,
            created_at: None,
            updated_at: None,
            parameters: BTreeMap::new(),
            outputs: BTreeMap::new(),
            tags,
        };
        let stack = FakeStack {
            state,
            template: String::new(),
            resources: BTreeMap::new(),
            happened: Vec::new(),
            coming: VecDeque::new(),
        };
        self.lock().stacks.insert(name.to_owned(), stack);
    }
}

impl Inside {
    fn event(
        &mut self,
        resource: &str,
        kind: &str,
        status: &str,
        reason: Option<&str>,
    ) -> StackEvent {
        self.events += 1;
        StackEvent {
            id: self.events.to_string(),
            resource: resource.to_owned(),
            kind: kind.to_owned(),
            physical_id: format!("physical-{}", resource.to_lowercase()),
            status: Status(status.to_owned()),
            reason: reason.map(str::to_owned),
        }
    }

    fn find(&mut self, name: &str) -> Option<&mut FakeStack> {
        self.stacks.values_mut().find(|one| one.state.name == name || one.state.id == name)
    }

    /// Changes the stack's resources to `after`, with one event per poll.
    fn change(&mut self, name: &str, verb: &str, after: BTreeMap<String, String>) {
        const STACK: &str = "AWS::CloudFormation::Stack";
        let before = self.find(name).map(|s| s.resources.clone()).unwrap_or_default();
        let under_way = Status(format!("{verb}_IN_PROGRESS"));
        let mut coming: VecDeque<(StackEvent, Status)> = VecDeque::new();
        coming.push_back((self.event(name, STACK, under_way.as_str(), None), under_way.clone()));
        let new: Vec<(String, String)> =
            after.iter().filter(|(resource, _)| !before.contains_key(*resource)).map(own).collect();
        for (resource, kind) in &new {
            coming.push_back((
                self.event(resource, kind, "CREATE_IN_PROGRESS", None),
                under_way.clone(),
            ));
            let fails = self.fails.take_if(|(failing, _)| failing == resource);
            let Some((_, reason)) = fails else {
                coming.push_back((
                    self.event(resource, kind, "CREATE_COMPLETE", None),
                    under_way.clone(),
                ));
                continue;
            };
            let failed = self.event(resource, kind, "CREATE_FAILED", Some(&reason));
            coming.push_back((failed, under_way.clone()));
            let cancelled = Some("Resource creation cancelled");
            let other = self.event("Another", kind, "CREATE_FAILED", cancelled);
            coming.push_back((other, under_way));
            let end = match verb {
                "CREATE" => "ROLLBACK_COMPLETE",
                _ => "UPDATE_ROLLBACK_COMPLETE",
            };
            coming.push_back((self.event(name, STACK, end, None), Status(end.to_owned())));
            if let Some(stack) = self.find(name) {
                stack.coming = coming;
            }
            return;
        }
        let end = format!("{verb}_COMPLETE");
        coming.push_back((self.event(name, STACK, &end, None), Status(end)));
        if let Some(stack) = self.find(name) {
            stack.resources = after;
            stack.coming = coming;
        }
    }
}

fn own((resource, kind): (&String, &String)) -> (String, String) {
    (resource.clone(), kind.clone())
}

fn rendered(plan: &StackPlan) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
    let code = plan.parameters.get(StackPlan::CODE_KEY).cloned().unwrap_or_default();
    let mut without = plan.clone();
    without.parameters.remove(StackPlan::CODE_KEY);
    let stack = Stack::of(&without, &code);
    let resources = stack.resources.iter().map(|(name, one)| (name.clone(), text(&one["Type"])));
    let outputs = stack.outputs.iter().map(|(name, one)| (name.clone(), text(&one["Value"])));
    (resources.collect(), outputs.collect())
}

fn parameters(plan: &StackPlan) -> BTreeMap<String, String> {
    let mut all = plan.parameters.clone();
    all.entry(StackPlan::CODE_KEY.to_owned()).or_default();
    all
}

fn done<'a, T: Send + 'a>(result: Result<T, CloudError>) -> BoxFuture<'a, Result<T, CloudError>> {
    Box::pin(std::future::ready(result))
}

impl Cloud for FakeCloud {
    fn stack<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Option<StackState>, CloudError>> {
        let mut inside = self.lock();
        let (after, lost) = &mut inside.failing_polls;
        if *after > 0 {
            *after -= 1;
        } else if *lost > 0 {
            *lost -= 1;
            return done(Err(CloudError::new(CloudErrorKind::Unavailable, "no answer")));
        }
        let Some(stack) = inside.find(name) else { return done(Ok(None)) };
        if let Some((event, status)) = stack.coming.pop_front() {
            stack.happened.push(event);
            stack.state.status = status;
        }
        let state = stack.state.clone();
        if state.status.as_str() == "DELETE_COMPLETE" && name == state.name {
            return done(Ok(None));
        }
        done(Ok(Some(state)))
    }

    fn stacks(&self) -> BoxFuture<'_, Result<Vec<StackState>, CloudError>> {
        done(Ok(self.lock().stacks.values().map(|one| one.state.clone()).collect()))
    }

    fn events<'a>(
        &'a self,
        name: &'a str,
        after: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Vec<StackEvent>, CloudError>> {
        let mut inside = self.lock();
        let Some(stack) = inside.find(name) else { return done(Ok(Vec::new())) };
        let all = &stack.happened;
        let from = after.and_then(|id| all.iter().position(|event| event.id == id));
        done(Ok(all[from.map_or(0, |at| at + 1)..].to_vec()))
    }

    fn create<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<String, CloudError>> {
        let name = plan.name.to_string();
        let (resources, outputs) = rendered(plan);
        let mut inside = self.lock();
        inside.calls.push(format!("create {name}"));
        let id =
            format!("arn:aws:cloudformation:eu-west-1:123456789012:stack/{name}/{}", inside.events);
        let state = StackState {
            name: name.clone(),
            id: id.clone(),
            status: Status("CREATE_IN_PROGRESS".to_owned()),
            reason: None,
            created_at: Some(0),
            updated_at: None,
            parameters: parameters(plan),
            outputs,
            tags: plan.tags.clone(),
        };
        let stack = FakeStack {
            state,
            template: plan.template.clone(),
            resources: BTreeMap::new(),
            happened: Vec::new(),
            coming: VecDeque::new(),
        };
        inside.stacks.insert(name.clone(), stack);
        inside.change(&name, "CREATE", resources);
        done(Ok(id))
    }

    fn update<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<Update, CloudError>> {
        let name = plan.name.to_string();
        let (resources, outputs) = rendered(plan);
        let mut inside = self.lock();
        let stack = inside.find(&name).expect("a stack to update");
        let state = &mut stack.state;
        if (&state.parameters, &state.tags, &stack.template)
            == (&parameters(plan), &plan.tags, &plan.template)
        {
            inside.calls.push(format!("update {name}: nothing to do"));
            return done(Ok(Update::Unchanged));
        }
        state.parameters = parameters(plan);
        state.outputs = outputs;
        state.tags = plan.tags.clone();
        state.status = Status("UPDATE_IN_PROGRESS".to_owned());
        stack.template = plan.template.clone();
        inside.calls.push(format!("update {name}"));
        inside.change(&name, "UPDATE", resources);
        done(Ok(Update::Started))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        let mut inside = self.lock();
        let stack = inside.find(name).expect("a stack to delete");
        stack.state.status = Status("DELETE_IN_PROGRESS".to_owned());
        let bucket = stack.state.outputs.get("CodeBucketName").cloned().unwrap_or_default();
        let name = stack.state.name.clone();
        inside.calls.push(format!("delete {name}"));
        let full = inside.buckets.get(&bucket).is_some_and(|objects| !objects.is_empty());
        if full {
            let reason = Some("The bucket you tried to delete is not empty");
            let failed = inside.event("CodeBucket", "AWS::S3::Bucket", "DELETE_FAILED", reason);
            let stack = inside.find(&name).expect("it is there");
            stack.coming.push_back((failed, Status("DELETE_FAILED".to_owned())));
            return done(Ok(()));
        }
        inside.change(&name, "DELETE", BTreeMap::new());
        let stack = inside.find(&name).expect("it is there");
        let archive = stack.state.outputs.contains_key("ArchiveBucketName");
        if archive {
            let mut coming = std::mem::take(&mut stack.coming);
            let last = coming.pop_back().expect("an end");
            let skipped = inside.event("ArchiveBucket", "AWS::S3::Bucket", "DELETE_SKIPPED", None);
            coming.push_back((skipped, Status("DELETE_IN_PROGRESS".to_owned())));
            coming.push_back(last);
            inside.find(&name).expect("it is there").coming = coming;
        }
        done(Ok(()))
    }

    fn has_object<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
    ) -> BoxFuture<'a, Result<bool, CloudError>> {
        let inside = self.lock();
        done(Ok(inside.buckets.get(bucket).is_some_and(|objects| objects.contains(key))))
    }

    fn put_object<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
        _: Vec<u8>,
    ) -> BoxFuture<'a, Result<(), CloudError>> {
        let mut inside = self.lock();
        inside.calls.push(format!("put {key}"));
        inside.buckets.entry(bucket.to_owned()).or_default().insert(key.to_owned());
        done(Ok(()))
    }

    fn empty_bucket<'a>(&'a self, bucket: &'a str) -> BoxFuture<'a, Result<u64, CloudError>> {
        let mut inside = self.lock();
        inside.calls.push(format!("empty {bucket}"));
        done(Ok(inside.buckets.remove(bucket).map_or(0, |objects| objects.len() as u64)))
    }

    fn table<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Option<TableFigures>, CloudError>> {
        done(Ok(Some(TableFigures::default())))
    }

    fn stream_lag<'a>(
        &'a self,
        _: &'a str,
        _: i64,
    ) -> BoxFuture<'a, Result<Option<f64>, CloudError>> {
        done(Ok(None))
    }

    fn queue_length<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<u64, CloudError>> {
        done(Ok(0))
    }
}
