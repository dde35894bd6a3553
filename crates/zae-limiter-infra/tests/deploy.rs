//! Deployments on a fake cloud: the calls and their order, the progress, and how they resume.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[allow(dead_code, reason = "not every test uses all of it")]
mod common;

use std::sync::Arc;

use common::fake::{FakeCloud, NoWait};
use zae_limiter_infra::{
    Architecture, Cause, Cloud as _, Deleted, DeployError, Deployed, Deployer, Package, Progress,
    StackEvent, StackOptions, StackPlan, StackState, Wait, tag,
};

/// Records the progress.
#[derive(Default)]
struct Recorded(Vec<String>);

impl Progress for Recorded {
    fn event(&mut self, event: &StackEvent) {
        self.0.push(format!("{} {}", event.resource, event.status));
    }

    fn step(&mut self, what: &str) {
        self.0.push(what.to_owned());
    }
}

/// A fake cloud with a deployer.
struct Scene {
    cloud: Arc<FakeCloud>,
    deployer: Deployer,
    package: Package,
}

impl Scene {
    fn new() -> Self {
        let cloud = Arc::new(FakeCloud::default());
        let deployer = Deployer::new(Arc::clone(&cloud) as _, Arc::new(NoWait));
        let program = std::fs::read("/bin/sh").unwrap();
        Self { cloud, deployer, package: Package::of(&program, None).unwrap() }
    }

    async fn deploy(&self, options: &StackOptions) -> (Result<Deployed, DeployError>, Vec<String>) {
        let mut progress = Recorded::default();
        let plan = options.plan().unwrap();
        let deployed = self.deployer.deploy(&plan, Some(&self.package), &mut progress).await;
        (deployed, progress.0)
    }

    async fn state(&self) -> StackState {
        self.cloud.stack("my-app").await.unwrap().unwrap()
    }
}

fn options() -> StackOptions {
    StackOptions::new("my-app".parse().unwrap())
}

#[tokio::test]
async fn a_first_deployment_uploads_the_code_between_two_steps() {
    let scene = Scene::new();
    let (deployed, progress) = scene.deploy(&options()).await;
    assert!(matches!(deployed, Ok(Deployed::Created(_))), "{deployed:?}");
    let key = scene.package.key();
    assert_eq!(scene.cloud.calls(), ["create my-app", &format!("put {key}"), "update my-app"]);
    assert!(scene.cloud.resources("my-app").contains(&"Aggregator".to_owned()));
    let at = |what: &str| progress.iter().position(|one| one.starts_with(what)).expect(what);
    assert!(at("Table CREATE_COMPLETE") < at("uploading the aggregator"));
    assert!(at("uploading the aggregator") < at("Aggregator CREATE_COMPLETE"));
    assert_eq!(
        progress.iter().filter(|one| *one == "Table CREATE_COMPLETE").count(),
        1,
        "{progress:?}"
    );
}

#[tokio::test]
async fn a_second_deployment_changes_nothing() {
    let scene = Scene::new();
    scene.deploy(&options()).await.0.unwrap();
    scene.cloud.calls();
    let (deployed, _) = scene.deploy(&options()).await;
    assert!(matches!(deployed, Ok(Deployed::Unchanged(_))), "{deployed:?}");
    assert_eq!(scene.cloud.calls(), ["update my-app: nothing to do"]);
}

#[tokio::test]
async fn changed_options_change_the_stack_and_upload_nothing_again() {
    let scene = Scene::new();
    scene.deploy(&options()).await.0.unwrap();
    scene.cloud.calls();
    let (deployed, _) = scene.deploy(&options().lambda_memory(512)).await;
    assert!(matches!(deployed, Ok(Deployed::Updated(_))), "{deployed:?}");
    assert_eq!(scene.cloud.calls(), ["update my-app"]);
    assert_eq!(scene.state().await.parameters["LambdaMemory"], "512");
    assert_eq!(scene.cloud.objects("ref:CodeBucket"), [scene.package.key()]);
}

#[tokio::test]
async fn without_an_aggregator_one_step_suffices_and_no_code_is_uploaded() {
    let scene = Scene::new();
    scene.deploy(&options().no_aggregator()).await.0.unwrap();
    assert_eq!(scene.cloud.calls(), ["create my-app"]);
    // Adding the aggregator later takes two steps as well.
    scene.deploy(&options()).await.0.unwrap();
    let key = scene.package.key();
    assert_eq!(scene.cloud.calls(), ["update my-app", &format!("put {key}"), "update my-app"]);
    assert!(scene.cloud.resources("my-app").contains(&"Aggregator".to_owned()));
}

#[tokio::test]
async fn a_failure_is_reported_with_its_first_cause() {
    let scene = Scene::new();
    scene.cloud.fail("Table", "my-app already exists in stack other");
    let (deployed, _) = scene.deploy(&options()).await;
    let Err(DeployError::Failed { stack, status, cause }) = deployed else {
        panic!("{deployed:?}");
    };
    assert_eq!((stack.as_str(), status.as_str()), ("my-app", "ROLLBACK_COMPLETE"));
    let cause = cause.unwrap();
    assert_eq!(cause.resource, "Table");
    assert!(cause.reason.contains("already exists"));
    assert!(cause.hint().unwrap().contains("--name"));
    // The next deployment succeeds.
    scene.cloud.calls();
    let (deployed, progress) = scene.deploy(&options()).await;
    assert!(matches!(deployed, Ok(Deployed::Created(_))), "{deployed:?}");
    assert_eq!(scene.cloud.calls()[..2], ["delete my-app", "create my-app"]);
    assert!(progress.iter().any(|one| one.contains("deleting what it left")));
}

#[tokio::test]
async fn a_failed_update_is_rolled_back_and_can_be_repeated() {
    let scene = Scene::new();
    scene.deploy(&options().no_alarms()).await.0.unwrap();
    scene.cloud.fail("ErrorAlarm", "not authorized to perform: cloudwatch:PutMetricAlarm");
    let (deployed, _) = scene.deploy(&options()).await;
    let Err(DeployError::Failed { status, cause, .. }) = deployed else { panic!("{deployed:?}") };
    assert_eq!(status, "UPDATE_ROLLBACK_COMPLETE");
    assert!(cause.unwrap().hint().unwrap().contains("permission"));
    let (deployed, _) = scene.deploy(&options().lambda_memory(512)).await;
    assert!(matches!(deployed, Ok(Deployed::Updated(_))), "{deployed:?}");
}

#[tokio::test]
async fn an_interrupted_deployment_is_resumed_by_the_next_one() {
    let scene = Scene::new();
    let plan = options().plan().unwrap();
    // Interrupted at once: the first step is in progress.
    let no_wait = scene.deployer.clone().wait(Wait::No);
    let started =
        no_wait.deploy(&plan, Some(&scene.package), &mut Recorded::default()).await.unwrap();
    assert_eq!(started, Deployed::Started { unfinished: true });
    assert!(scene.state().await.status.is_under_way());
    let (deployed, progress) = scene.deploy(&options()).await;
    assert!(matches!(deployed, Ok(Deployed::Updated(_))), "{deployed:?}");
    assert!(progress[0].contains("waiting until that is complete"), "{progress:?}");
    let key = scene.package.key();
    assert_eq!(scene.cloud.calls(), ["create my-app", &format!("put {key}"), "update my-app"]);
    assert!(scene.cloud.resources("my-app").contains(&"Aggregator".to_owned()));
}

#[tokio::test]
async fn failed_polls_are_retried_a_few_times() {
    for (lost, is_done) in [(4, true), (5, false)] {
        let scene = Scene::new();
        scene.cloud.fail_polls(3, lost);
        let (deployed, progress) = scene.deploy(&options().no_aggregator()).await;
        assert_eq!(deployed.is_ok(), is_done, "{lost}: {deployed:?}");
        // Each retry is said: a poll may take as long as a call is allowed to.
        let again = progress.iter().filter(|one| one.ends_with("; trying again")).count();
        assert_eq!(again, 4, "{progress:?}");
        // In both cases the next deployment succeeds.
        scene.deploy(&options().no_aggregator()).await.0.unwrap();
        assert_eq!(scene.cloud.calls()[0], "create my-app");
    }
}

#[tokio::test]
async fn stacks_of_other_programs_are_never_changed() {
    let scene = Scene::new();
    scene.cloud.put_foreign("my-app", "CREATE_COMPLETE", &[("team", "other")]);
    let (deployed, _) = scene.deploy(&options()).await;
    let Err(DeployError::NotOurs { message, hint }) = deployed else { panic!("{deployed:?}") };
    assert!(message.contains("not a limiter's") && hint.contains("--name"));
    scene.cloud.put_foreign("my-app", "ROLLBACK_COMPLETE", &[("team", "other")]);
    assert!(matches!(scene.deploy(&options()).await.0, Err(DeployError::NotOurs { .. })));
    scene.cloud.put_foreign("my-app", "UPDATE_COMPLETE", &[("ManagedBy", "zae-limiter")]);
    let (deployed, _) = scene.deploy(&options()).await;
    let Err(DeployError::NotOurs { message, .. }) = deployed else { panic!("{deployed:?}") };
    assert!(message.contains("Python"), "{message}");
    assert!(scene.deployer.ours("my-app").await.is_err());
    assert_eq!(scene.cloud.calls(), [""; 0]);
}

#[tokio::test]
async fn a_deletion_names_the_resources_that_were_kept() {
    let scene = Scene::new();
    scene.deploy(&options()).await.0.unwrap();
    scene.cloud.calls();
    let state = scene.deployer.ours("my-app").await.unwrap();
    let deleted = scene.deployer.delete(&state, Wait::UntilDone, &mut Recorded::default()).await;
    let Ok(Deleted::Gone { kept }) = deleted else { panic!("{deleted:?}") };
    assert_eq!(scene.cloud.calls(), ["empty ref:CodeBucket", "delete my-app"]);
    assert!(kept.iter().any(|(kind, _)| kind == "AWS::S3::Bucket"), "{kept:?}");
    let found = scene.deployer.ours("my-app").await;
    assert!(matches!(found, Err(DeployError::NoStack { .. })), "{found:?}");
}

#[tokio::test]
async fn a_protected_stack_is_not_deleted() {
    let scene = Scene::new();
    scene.deploy(&options().enable_deletion_protection()).await.0.unwrap();
    scene.cloud.calls();
    let state = scene.deployer.ours("my-app").await.unwrap();
    let deleted = scene.deployer.delete(&state, Wait::UntilDone, &mut Recorded::default()).await;
    let Err(DeployError::Stuck { hint, .. }) = deleted else { panic!("{deleted:?}") };
    assert!(hint.contains("--enable-deletion-protection"));
    assert_eq!(scene.cloud.calls(), [""; 0]);
}

#[test]
fn the_cause_is_the_first_failure_that_no_other_one_caused() {
    let event = |resource: &str, status: &str, reason: &str| StackEvent {
        id: String::new(),
        resource: resource.to_owned(),
        kind: "AWS::IAM::Role".to_owned(),
        physical_id: String::new(),
        status: zae_limiter_infra::Status(status.to_owned()),
        reason: Some(reason.to_owned()),
    };
    let events = [
        event("A", "CREATE_FAILED", "Resource creation cancelled"),
        event("B", "CREATE_IN_PROGRESS", "Resource creation Initiated"),
        event("C", "CREATE_FAILED", "API: iam:CreateRole User is not authorized to perform"),
        event("D", "CREATE_FAILED", "something else"),
    ];
    let cause = Cause::first(&events).unwrap();
    assert_eq!(cause.resource, "C");
    assert!(cause.hint().unwrap().contains("--no-iam"));
}

#[tokio::test]
async fn an_upgrade_keeps_every_option_and_tag() {
    let scene = Scene::new();
    let wanted = options()
        .lambda_memory(512)
        .retain_table(zae_limiter_infra::RetainTable::Yes)
        .tag("team", "gateway");
    scene.deploy(&wanted).await.0.unwrap();
    let mut state = scene.state().await;
    // As if an older release had deployed it.
    state.tags.insert("zae-limiter:version".to_owned(), "0.0.1".to_owned());
    state.tags.insert("aws:cloudformation:stack-name".to_owned(), "my-app".to_owned());
    state.parameters.insert("GoneInThisRelease".to_owned(), "x".to_owned());
    let upgrade = zae_limiter_infra::StackPlan::upgrade_of(&state, state.name.parse().unwrap());
    let mut plan = wanted.plan().unwrap();
    plan.parameters.insert("AggregatorCodeKey".to_owned(), scene.package.key());
    assert_eq!(upgrade, plan);
}

#[tokio::test]
async fn the_version_is_written_once() {
    use zae_limiter_core::Timestamp;
    use zae_limiter_infra::records::{ensure_version, read_version};
    let table = zae_limiter_testkit::SimTable::default();
    assert_eq!(read_version(&table).await.unwrap(), None);
    let first = ensure_version(&table, Timestamp::from_millis(1_800_000_000_000)).await.unwrap();
    let second = ensure_version(&table, Timestamp::from_millis(1_900_000_000_000)).await.unwrap();
    assert_eq!((first.schema.as_str(), &first), ("0.10.0", &second));
    assert_eq!(read_version(&table).await.unwrap(), Some(first));
}

#[tokio::test]
async fn a_stack_of_a_later_release_is_never_downgraded() {
    let scene = Scene::new();
    scene.deploy(&options()).await.0.unwrap();
    let mut plan = options().plan().unwrap();
    plan.parameters.insert("AggregatorCodeKey".to_owned(), scene.package.key());
    plan.tags.insert("zae-limiter:version".to_owned(), "99.0.0".to_owned());
    scene.cloud.update(&plan).await.unwrap();
    scene.cloud.calls();
    let (deployed, _) = scene.deploy(&options().lambda_memory(512)).await;
    let Err(DeployError::Stuck { status, .. }) = deployed else { panic!("{deployed:?}") };
    assert!(status.contains("stack 99.0.0"), "{status}");
    assert_eq!(scene.cloud.calls(), [""; 0]);
}

#[tokio::test]
async fn without_code_a_stack_keeps_the_aggregator_it_has() {
    let scene = Scene::new();
    scene.deploy(&options()).await.0.unwrap();
    let plan = options().lambda_memory(512).plan().unwrap();
    let deployed = scene.deployer.deploy(&plan, None, &mut Recorded::default()).await;
    assert!(matches!(deployed, Ok(Deployed::Updated(_))), "{deployed:?}");
    assert!(scene.cloud.resources("my-app").contains(&"Aggregator".to_owned()));
}

#[tokio::test]
async fn the_projection_of_an_index_is_never_changed() {
    let scene = Scene::new();
    scene.deploy(&options()).await.0.unwrap();
    scene.cloud.calls();
    let all = options().resource_index(zae_limiter_infra::ResourceIndex::All);
    let (deployed, _) = scene.deploy(&all).await;
    let Err(DeployError::Stuck { status, .. }) = deployed else { panic!("{deployed:?}") };
    assert!(status.contains("--gsi2-projection keys-only"), "{status}");
    assert_eq!(scene.cloud.calls(), [""; 0]);
}

#[tokio::test]
async fn without_code_a_stack_keeps_its_aggregator_and_its_processor() {
    let scene = Scene::new();
    let arm = options().architecture(Architecture::Arm64);
    assert!(scene.deploy(&arm).await.0.is_ok());
    let before = scene.state().await;
    let plan = options().lambda_memory(512).plan().unwrap();
    let deployed = scene.deployer.deploy(&plan, None, &mut Recorded::default()).await;
    assert!(matches!(deployed, Ok(Deployed::Updated(_))), "{deployed:?}");
    let after = scene.state().await;
    assert_eq!(after.parameters["LambdaMemory"], "512");
    for kept in [StackPlan::CODE_KEY, StackPlan::ARCHITECTURE] {
        assert_eq!(after.parameters[kept], before.parameters[kept], "{kept}");
    }
}

#[tokio::test]
async fn only_a_deployed_aggregator_of_this_release_is_current() {
    let scene = Scene::new();
    let current = || scene.deployer.has_current_aggregator("my-app");
    assert!(!current().await.unwrap(), "there is no stack");
    let plan = options().plan().unwrap();
    assert!(scene.deployer.deploy(&plan, None, &mut Recorded::default()).await.is_ok());
    assert!(!current().await.unwrap(), "the stack has no function");
    assert!(scene.deploy(&options()).await.0.is_ok());
    assert!(current().await.unwrap());
    let mut older = plan.clone();
    older.tags.insert(tag::AGGREGATOR_VERSION.to_owned(), "0.0.1".to_owned());
    assert!(scene.deployer.deploy(&older, None, &mut Recorded::default()).await.is_ok());
    assert!(!current().await.unwrap(), "it is of another release");
}
