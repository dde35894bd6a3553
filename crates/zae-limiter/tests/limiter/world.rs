//! A store, a manual clock, and helpers for most tests.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tempfile::TempDir;
use tokio::runtime::{Builder as RuntimeBuilder, Runtime};
use zae_limiter::model::{Bucket, EntityId, NamespaceId, ResourceName};
use zae_limiter::store::{BucketKey, Store};
use zae_limiter::testing::{Clock as _, Entropy, ManualClock};
use zae_limiter::{
    Builder, Config, Entity, Error, Lease, Limit, LimitStatus, MemoryStore, RateLimitExceeded,
    RateLimiter, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{Faulty, SimTable};

/// 2026-11-15T14:00:00Z.
pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_794_751_200_000);

/// The most polls before a test gives up.
const LOOKS_MAX: usize = 100_000;

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    #[cfg(feature = "sqlite")]
    Sqlite,
    /// On a simulated table in which no time passes, with a runtime of the store's own.
    DynamoDb,
}

impl Kind {
    pub(crate) const ALL: &[Self] = &[
        Self::Memory,
        #[cfg(feature = "sqlite")]
        Self::Sqlite,
        Self::DynamoDb,
    ];

    #[cfg_attr(not(feature = "sqlite"), expect(unused_variables, reason = "only files need it"))]
    fn open(self, folder: &TempDir) -> Arc<dyn Store> {
        match self {
            Self::Memory => Arc::new(MemoryStore::new()),
            #[cfg(feature = "sqlite")]
            Self::Sqlite => {
                let path = folder.path().join("limits.db");
                Arc::new(zae_limiter::SqliteStore::open(path).unwrap())
            }
            Self::DynamoDb => {
                let table = SimTable::default().leaving_tasks();
                let options = DynamoOptions::default().seed(1).worker_threads(2);
                Arc::new(DynamoStore::new(Arc::new(table), options))
            }
        }
    }
}

/// A fresh store that can be made to fail, and a clock that stands until it is moved.
pub(crate) struct World {
    kind: Kind,
    pub(crate) store: Arc<Faulty<dyn Store>>,
    pub(crate) clock: Arc<ManualClock>,
    /// Each limiter draws ids of its own.
    seeds: AtomicU64,
    // Removed after the store is closed.
    _folder: TempDir,
}

/// Says which store it was when a test fails.
struct Named(Kind);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this was on the store {:?}", self.0);
        }
    }
}

/// Runs a test on each store. The runtime has no timer: waiting for real time panics.
pub(crate) fn on_every_store(test: impl AsyncFn(World)) {
    for kind in Kind::ALL {
        on(*kind, &test);
    }
}

/// Runs a test on each store but those that promise something else, by design.
pub(crate) fn on_every_store_but(others: &[Kind], test: impl AsyncFn(World)) {
    for kind in Kind::ALL.iter().filter(|kind| !others.contains(kind)) {
        on(*kind, &test);
    }
}

/// Runs a test on one store.
pub(crate) fn on(kind: Kind, test: impl AsyncFn(World)) {
    let _named = Named(kind);
    let runtime = RuntimeBuilder::new_current_thread().build().unwrap();
    runtime.block_on(test(World::new(kind)));
}

/// Runs a test on each store, with four threads.
pub(crate) fn on_every_store_with_threads(test: impl AsyncFn(World)) {
    for kind in Kind::ALL {
        let _named = Named(*kind);
        threads().block_on(test(World::new(*kind)));
    }
}

pub(crate) fn threads() -> Runtime {
    RuntimeBuilder::new_multi_thread().worker_threads(4).build().unwrap()
}

impl World {
    pub(crate) fn new(kind: Kind) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            kind,
            store: Arc::new(Faulty::new(kind.open(&folder))),
            clock: Arc::new(ManualClock::new(NOW)),
            seeds: AtomicU64::new(1),
            _folder: folder,
        }
    }

    /// Another one with the same kind of store.
    pub(crate) fn new_like(other: &Self) -> Self {
        Self::new(other.kind)
    }

    /// Whether the store is of this kind, for the few promises in which stores differ.
    pub(crate) fn is(&self, kind: Kind) -> bool {
        self.kind == kind
    }

    pub(crate) fn builder(&self) -> Builder {
        let store: Arc<dyn Store> = Arc::clone(&self.store) as Arc<dyn Store>;
        let clock = Arc::clone(&self.clock);
        let seed = self.seeds.fetch_add(1, Ordering::Relaxed);
        RateLimiter::builder(store).clock(clock).entropy(Entropy::seeded(seed))
    }

    /// A limiter of the namespace `default`.
    pub(crate) async fn limiter(&self) -> RateLimiter {
        self.builder().open().await.unwrap()
    }

    /// A limiter with these system defaults stored.
    pub(crate) async fn limiter_with<const N: usize>(&self, limits: [Limit; N]) -> RateLimiter {
        let limiter = self.limiter().await;
        limiter.set_system_defaults(limits, None).await.unwrap();
        limiter
    }

    pub(crate) fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    /// The stored bucket, refilled up to now, read without faults.
    pub(crate) async fn bucket(
        &self,
        limiter: &RateLimiter,
        entity: &str,
        on: &str,
    ) -> Option<Bucket> {
        let key = [bucket_key(limiter.namespace_id(), entity, on)];
        let now = self.clock.now();
        let mut bucket = self.store.inner().peek(&key, now).await.unwrap().remove(0)?;
        bucket.refill(now);
        Some(bucket)
    }

    /// The balance and the net consumption, in millitokens, of a bucket that must exist.
    pub(crate) async fn cell(
        &self,
        limiter: &RateLimiter,
        entity: &str,
        on: &str,
        limit: &str,
    ) -> (i64, i64) {
        let bucket = self.bucket(limiter, entity, on).await.expect("the bucket exists");
        let (cell, _) = bucket.cell(limit).expect("the bucket has the limit");
        (cell.tokens.get(), cell.consumed.get())
    }
}

pub(crate) fn bucket_key(namespace: &NamespaceId, entity: &str, on: &str) -> BucketKey {
    BucketKey { namespace: namespace.clone(), entity: entity_id(entity), resource: resource(on) }
}

pub(crate) fn entity_id(id: &str) -> EntityId {
    EntityId::new(id).unwrap()
}

pub(crate) fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).unwrap()
}

pub(crate) fn per_minute(name: &str, amount: u64) -> Limit {
    Limit::per_minute(name, amount)
}

/// Refills, but too slowly to be seen within a test.
pub(crate) fn without_refill(name: &str, capacity: u64) -> Limit {
    Limit::per(name, 1, secs(1_000_000_000)).burst(capacity)
}

/// Takes and keeps; must be admitted.
pub(crate) async fn spend(limiter: &RateLimiter, entity: &str, on: &str, limit: &str, tokens: u64) {
    let taken = limiter.acquire(entity, on).take(limit, tokens).await;
    let lease = taken.unwrap_or_else(|error| panic!("{tokens} of {limit}: {error}"));
    lease.commit().await.unwrap();
}

/// The refusal of an acquire that must be refused.
pub(crate) async fn refusal(
    limiter: &RateLimiter,
    entity: &str,
    on: &str,
    limit: &str,
    tokens: u64,
) -> RateLimitExceeded {
    exceeded(limiter.acquire(entity, on).take(limit, tokens).await)
}

/// The refusal that a call must have come to.
pub(crate) fn exceeded(done: Result<Lease, Error>) -> RateLimitExceeded {
    match done {
        Err(Error::Exceeded(refusal)) => *refusal,
        Err(other) => panic!("must be refused, was another error: {other:?}"),
        Ok(lease) => panic!("must be refused, was admitted: {:?}", lease.statuses()),
    }
}

/// The balance of an entity's own limit, in whole tokens, from the limiter.
pub(crate) async fn left(limiter: &RateLimiter, entity: &str, on: &str, limit: &str) -> i64 {
    status(limiter, entity, on, limit).await.available.whole_tokens()
}

/// The status of an entity's own limit.
pub(crate) async fn status(
    limiter: &RateLimiter,
    entity: &str,
    on: &str,
    limit: &str,
) -> LimitStatus {
    let statuses = limiter.available(entity, on, &[(limit, 0)]).await.unwrap();
    let own = |status: &LimitStatus| status.level == 0 && status.limit_name.as_str() == limit;
    statuses.into_iter().find(own).expect("the entity has the limit")
}

/// A cascading child.
pub(crate) async fn child(limiter: &RateLimiter, id: &str, parent: &str) -> Entity {
    limiter.create_entity(id).parent(parent).cascade().await.unwrap()
}

pub(crate) async fn own_limits<const N: usize>(
    limiter: &RateLimiter,
    entity: &str,
    limits: [Limit; N],
) -> Config {
    limiter.set_limits(entity, None, limits).await.unwrap()
}

/// Polls once, without a waker.
pub(crate) fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls the work until it is done, at most `LOOKS_MAX` times, and lets other tasks and threads run.
pub(crate) async fn finish<F: Future>(work: F) -> F::Output {
    let mut work = pin!(work);
    for _ in 0..LOOKS_MAX {
        if let Poll::Ready(done) = poll_once(work.as_mut()) {
            return done;
        }
        turn().await;
    }
    panic!("not done after {LOOKS_MAX} looks");
}

/// Waits until the condition holds.
pub(crate) async fn soon(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..LOOKS_MAX {
        if holds().await {
            return;
        }
        turn().await;
    }
    panic!("not even after {LOOKS_MAX} looks: {what}");
}

/// Lets other tasks and threads run.
pub(crate) async fn turn() {
    tokio::task::yield_now().await;
    std::thread::yield_now();
}

/// Lets all other work run, for checks that something does not happen.
pub(crate) async fn settle_down() {
    for _ in 0..200 {
        turn().await;
    }
}

/// Runs a call to its end, moving the clock while it waits to retry, and returns how long it took by
/// that clock. The deadline is one sleeper; a wait before a retry is the second.
pub(crate) async fn drive<F: Future>(world: &World, work: F) -> (F::Output, Duration) {
    let began = world.clock.now();
    let mut work = pin!(work);
    for _ in 0..LOOKS_MAX {
        if let Poll::Ready(done) = poll_once(work.as_mut()) {
            return (done, ms(world.clock.now().millis_since(began)));
        }
        if world.clock.sleepers() > 1 {
            world.advance(ms(1));
        }
        turn().await;
    }
    panic!("not done after {LOOKS_MAX} looks");
}
