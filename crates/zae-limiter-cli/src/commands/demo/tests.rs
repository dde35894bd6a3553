use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use zae_limiter::model::{Bucket, Millitokens, NamespaceId, ResourceList, ResourceName, Take};
use zae_limiter::store::{
    Admission, BoxFuture, BucketKey, BucketQuery, Key, Page, PageRequest, Placement, Plan, Query,
    Record, Scope, Settlement, Store, StoreError, StoredBucket, Target, Write, Written,
};
use zae_limiter::testing::{Clock, Entropy, ManualClock};
use zae_limiter::{MemoryStore, Timestamp};

use super::*;
use crate::cli::Cli;
use crate::interrupts::Interrupts;
use crate::printer::{Color, Printer};
use crate::world::{Terminal, World};

/// A faulty store: before each acquire it credits every bucket with some millitokens of its last
/// limit.
#[derive(Debug)]
struct OverAdmitting {
    store: MemoryStore,
    credit: i64,
}

impl OverAdmitting {
    async fn add_credit(&self, plan: &Plan) {
        let settlements: Vec<Settlement> = plan
            .legs
            .iter()
            .map(|leg| {
                let amount = Millitokens::new(-self.credit);
                let take = Take { cell: leg.target.limits().len() - 1, amount };
                let differences = std::iter::once(take).collect();
                Settlement {
                    target: Arc::clone(&leg.target),
                    placement: Placement::default(),
                    differences,
                }
            })
            .collect();
        self.store.settle(&settlements, plan.now).await.unwrap();
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for OverAdmitting {
    fn check_time(&self, now: Timestamp) -> zae_limiter::store::TimeCheck {
        self.store.check_time(now)
    }

    fn cost(&self) -> Option<zae_limiter::store::Cost> {
        self.store.cost()
    }

    fn usage_recording(&self) -> zae_limiter::store::UsageRecording {
        self.store.usage_recording()
    }

    fn acquire_now(&self, _: &Plan) -> Option<Result<Admission, zae_limiter::store::StoreError>> {
        None
    }

    fn take_now(
        &self,
        _: &zae_limiter::store::SingleLeg<'_>,
        _: &mut [zae_limiter::model::Millitokens],
    ) -> bool {
        false
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        Box::pin(async move {
            if self.credit > 0 {
                self.add_credit(plan).await;
            }
            self.store.acquire(plan).await
        })
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.store.settle(settlements, now)
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        self.store.peek(keys, now)
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.store.reconfigure(target, now)
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        self.store.get(keys)
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        self.store.write(batch)
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.store.delete(keys)
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        self.store.list(query, page)
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        self.store.list_buckets(query, page)
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.store.list_keys(scope, page)
    }

    fn note_deletion<'a>(
        &'a self,
        scope: &'a zae_limiter::store::Scope,
        now: zae_limiter::Timestamp,
    ) -> zae_limiter::store::BoxFuture<'a, Result<(), zae_limiter::store::StoreError>> {
        self.store.note_deletion(scope, now)
    }

    fn list_everything<'a>(
        &'a self,
        now: zae_limiter::Timestamp,
        page: &'a zae_limiter::store::PageRequest,
    ) -> zae_limiter::store::BoxFuture<
        'a,
        Result<zae_limiter::store::Page<zae_limiter::store::Key>, zae_limiter::store::StoreError>,
    > {
        self.store.list_everything(now, page)
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        self.store.list_resources(namespace, which, page)
    }
}

/// A clock whose sleeps end at once and advance the time.
#[derive(Debug)]
struct JumpingClock(Arc<ManualClock>);

impl Clock for JumpingClock {
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.0.advance(wait);
        Box::pin(std::future::ready(()))
    }
}

fn context(clock: &Arc<ManualClock>) -> Context {
    let world = World {
        args: Vec::new(),
        env: BTreeMap::new(),
        data_dir: None,
        program: None,
        clock: Arc::clone(clock) as Arc<dyn Clock>,
        pace: Arc::new(JumpingClock(Arc::clone(clock))),
        entropy: || Entropy::seeded(1),
        stdin: Box::new(io::empty()),
        stdout: Box::new(io::sink()),
        stderr: Box::new(io::sink()),
        terminal: Terminal::default(),
        interrupts: Interrupts::none(),
        exit: |status| panic!("exit with {status}"),
    };
    let sink = || Box::new(io::sink());
    let printer = Printer::new(sink(), sink(), Terminal::default(), Color::Never);
    let cli = Cli::read(&["demo".into()]).unwrap();
    Context::new(cli.globals, world, printer)
}

/// Plays on the faulty store. Returns the exit status and the over-admitted tokens.
fn outcome(credit: i64) -> (ExitStatus, i128) {
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1_794_752_736_000)));
    let mut context = context(&clock);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store: Arc<dyn Store> = Arc::new(OverAdmitting { store: MemoryStore::new(), credit });
        let limiter = context.builder_over(store).open().await.unwrap();
        let args = Args { seconds: 30, seed: 1 };
        let status = play(&args, &limiter, "a store", &mut context).await.unwrap();

        let registry = limiter.namespaces();
        registry.register("again").await.unwrap();
        let store = Arc::clone(limiter.store());
        let limiter = context.builder_over(store).namespace("again").open().await.unwrap();
        cast::set_up(&limiter).await.unwrap();
        let length = Duration::from_secs(30);
        let played = play::run(&limiter, &mut context, Show::Nothing, length, 1).await;
        let (tally, _) = played.unwrap();
        (status, tally.checks().map(|(_, _, check)| check.over_admitted()).sum())
    })
}

#[test]
fn the_check_finds_a_store_that_over_admits() {
    assert_eq!(outcome(0), (ExitStatus::Done, 0));
    for credit in [1_000, 50_000] {
        let (status, over_admitted) = outcome(credit);
        assert_eq!(status, ExitStatus::Error, "{credit} millitokens");
        assert!(over_admitted > 0, "{credit} millitokens");
    }
}
