//! Clients that register, delete, recover, purge and open the same namespace at once, each cut off anywhere.
//!
//! A client is a future over a store that stops before every call. A schedule says which client makes its next call;
//! when the schedule ends, all clients that have not ended are dropped. So the tree of all schedules contains every
//! interleaving and every cut-off. It is walked completely for two clients, and at random, by seeds, for three.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use zae_limiter::model::{Namespace, NamespaceId, NamespaceName, NamespaceStatus};
use zae_limiter::store::{
    Admission, BoxFuture, BucketKey, BucketQuery, Cost, Key, Page, PageRequest, Plan, Precondition,
    Query, Record, Scope, Settlement, Store, StoreError, StoredBucket, Target, UsageRecording,
    Write, Written,
};
use zae_limiter::testing::Entropy;
use zae_limiter::{Error, Namespaces, RateLimiter, Timestamp};

use crate::world::{Kind, NOW, World, on, per_minute};

const NAME: &str = "team";

/// What the clients do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Op {
    Register,
    Delete,
    Recover,
    Purge,
    Open,
}

const OPS: [Op; 5] = [Op::Register, Op::Delete, Op::Recover, Op::Purge, Op::Open];

/// The namespace before the clients start. Earlier releases left the last three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Active,
    Deleted,
    Purging,
    NameOfNothing,
    NameOfDeleted,
    Nameless,
}

const STARTS: [Start; 6] = [
    Start::Active,
    Start::Deleted,
    Start::Purging,
    Start::NameOfNothing,
    Start::NameOfDeleted,
    Start::Nameless,
];

struct Stepped {
    inner: Arc<dyn Store>,
    /// Only the calls of a race stop.
    is_racing: AtomicBool,
    is_paused: AtomicBool,
}

impl std::fmt::Debug for Stepped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Stepped")
    }
}

impl Stepped {
    /// Stops before a call, once.
    async fn stop(&self) {
        let mut has_stopped = !self.is_racing.load(Ordering::SeqCst);
        poll_fn(|_| {
            if std::mem::replace(&mut has_stopped, true) {
                return Poll::Ready(());
            }
            self.is_paused.store(true, Ordering::SeqCst);
            Poll::Pending
        })
        .await;
    }
}

type StoreFuture<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// Stops before the calls with which namespaces are changed, and before no other.
#[deny(clippy::missing_trait_methods)]
impl Store for Stepped {
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        self.inner.acquire_now(plan)
    }
    fn take_now(
        &self,
        leg: &zae_limiter::store::SingleLeg<'_>,
        left: &mut [zae_limiter::model::Millitokens],
    ) -> bool {
        self.inner.take_now(leg, left)
    }
    fn check_time(&self, now: Timestamp) -> zae_limiter::store::TimeCheck {
        self.inner.check_time(now)
    }
    fn cost(&self) -> Option<Cost> {
        self.inner.cost()
    }
    fn usage_recording(&self) -> UsageRecording {
        self.inner.usage_recording()
    }
    fn acquire<'a>(&'a self, plan: &'a Plan) -> StoreFuture<'a, Admission> {
        self.inner.acquire(plan)
    }
    fn settle<'a>(&'a self, all: &'a [Settlement], now: Timestamp) -> StoreFuture<'a, ()> {
        self.inner.settle(all, now)
    }
    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> StoreFuture<'a, Vec<Option<zae_limiter::model::Bucket>>> {
        self.inner.peek(keys, now)
    }
    fn reconfigure<'a>(&'a self, target: &'a Target, now: Timestamp) -> StoreFuture<'a, ()> {
        self.inner.reconfigure(target, now)
    }
    fn get<'a>(&'a self, keys: &'a [Key]) -> StoreFuture<'a, Vec<Option<Record>>> {
        // Nothing of a race changes what other reads find.
        let of_team = |key: &Key| match key {
            Key::Namespace(_) => true,
            Key::NamespaceName(name) => name.as_str() == NAME,
            _ => false,
        };
        Box::pin(async move {
            if keys.iter().any(of_team) {
                self.stop().await;
            }
            self.inner.get(keys).await
        })
    }
    fn write<'a>(&'a self, batch: &'a [Write]) -> StoreFuture<'a, Written> {
        Box::pin(async move {
            self.stop().await;
            self.inner.write(batch).await
        })
    }
    fn delete<'a>(&'a self, keys: &'a [Key]) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.stop().await;
            self.inner.delete(keys).await
        })
    }
    fn note_deletion<'a>(&'a self, scope: &'a Scope, now: Timestamp) -> StoreFuture<'a, ()> {
        self.inner.note_deletion(scope, now)
    }
    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> StoreFuture<'a, Page<Record>> {
        self.inner.list(query, page)
    }
    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> StoreFuture<'a, Page<StoredBucket>> {
        self.inner.list_buckets(query, page)
    }
    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> StoreFuture<'a, Page<Key>> {
        Box::pin(async move {
            self.stop().await;
            self.inner.list_keys(scope, page).await
        })
    }
    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> StoreFuture<'a, Page<Key>> {
        self.inner.list_everything(now, page)
    }
    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: zae_limiter::model::ResourceList,
        page: &'a PageRequest,
    ) -> StoreFuture<'a, Page<zae_limiter::model::ResourceName>> {
        self.inner.list_resources(namespace, which, page)
    }
}

type Work = Pin<Box<dyn Future<Output = Result<(), Error>>>>;

struct Client {
    store: Arc<Stepped>,
    /// `None` after it has ended.
    work: Option<Work>,
    result: Option<Result<(), Error>>,
}

impl Client {
    async fn new(world: &World, op: Op, id: NamespaceId, seed: u64) -> Self {
        let inner: Arc<dyn Store> = Arc::clone(&world.store) as Arc<dyn Store>;
        let (is_racing, is_paused) = (AtomicBool::new(false), AtomicBool::new(false));
        let store = Arc::new(Stepped { inner, is_racing, is_paused });
        let builder = || {
            let clock = Arc::clone(&world.clock);
            RateLimiter::builder(Arc::clone(&store)).clock(clock).entropy(Entropy::seeded(seed))
        };
        let registry = builder().open().await.unwrap().namespaces();
        let open = builder().namespace(NAME).open();
        let work = async move {
            match op {
                Op::Register => registry.register(NAME).await.map(drop),
                Op::Delete => registry.delete(NAME).await.map(drop),
                Op::Recover => registry.recover(&id).await.map(drop),
                Op::Purge => registry.purge(&id, |_| {}).await.map(drop),
                Op::Open => open.await.map(drop),
            }
        };
        store.is_racing.store(true, Ordering::SeqCst);
        Self { store, work: Some(Box::pin(work)), result: None }
    }

    /// Makes the next call.
    async fn advance(&mut self) {
        let Some(work) = &mut self.work else { return };
        self.store.is_paused.store(false, Ordering::SeqCst);
        let ended = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending if self.store.is_paused.load(Ordering::SeqCst) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        });
        if let Some(result) = ended.await {
            (self.work, self.result) = (None, Some(result));
        }
    }
}

/// A store with the namespace, one record in it, and a client that is never cut off.
struct Scene {
    world: World,
    registry: Namespaces,
    id: NamespaceId,
    start: Start,
}

impl Scene {
    async fn new(world: World, start: Start) -> Self {
        let registry = world.limiter().await.namespaces();
        let id = registry.register(NAME).await.unwrap().id;
        let limiter = world.builder().namespace(NAME).open().await.unwrap();
        limiter.set_system_defaults([per_minute("rpm", 10)], None).await.unwrap();
        let scene = Self { world, registry, id, start };
        scene.prepare().await;
        scene
    }

    async fn prepare(&self) {
        let name = NamespaceName::new(NAME).unwrap();
        let named = Record::NamespaceName(name, self.id.clone());
        match self.start {
            Start::Active => {}
            Start::Deleted => drop(self.registry.delete(NAME).await.unwrap()),
            Start::Purging => {
                let deleted = self.registry.delete(NAME).await.unwrap();
                self.put(Record::Namespace(Namespace { is_purging: true, ..deleted })).await;
            }
            Start::NameOfNothing => {
                self.registry.delete(NAME).await.unwrap();
                self.registry.purge(&self.id, |_| {}).await.unwrap();
                self.put(named).await;
            }
            Start::NameOfDeleted => {
                self.registry.delete(NAME).await.unwrap();
                self.put(named).await;
            }
            Start::Nameless => self.world.store.delete(&[named.key()]).await.unwrap(),
        }
    }

    async fn put(&self, record: Record) {
        let batch = [Write::Put(record, Precondition::Always)];
        assert_eq!(self.world.store.write(&batch).await.unwrap(), Written::Done);
    }

    async fn items(&self) -> usize {
        let scope = Scope::Namespace(self.id.clone());
        let page = self.world.store.list_keys(&scope, &PageRequest::first(100)).await.unwrap();
        page.items.iter().filter(|key| matches!(key, Key::Config(..))).count()
    }

    /// What must be true whatever the clients did, and wherever they were cut off.
    async fn check(&self) {
        let registry = &self.registry;
        let found = registry.by_id(&self.id).await.unwrap();
        match found.as_ref().map(Namespace::status) {
            // What is active, or can become active again, was not purged.
            Some(NamespaceStatus::Active | NamespaceStatus::Deleted) => {
                assert_eq!(self.items().await, 1, "purged and recovered");
            }
            Some(NamespaceStatus::Purging) => {}
            None => assert_eq!(self.items().await, 0, "left behind"),
        }
        for each in registry.list().all().await.unwrap() {
            let holder = registry.get(each.name.as_str()).await.unwrap();
            // Only an earlier release leaves a namespace without a name.
            let was_nameless = self.start == Start::Nameless && each.id == self.id;
            assert!(was_nameless || holder.is_some_and(|it| it.id == each.id), "nameless");
        }
        // The name can be used.
        let named = registry.register(NAME).await.unwrap();
        assert_eq!(registry.get(NAME).await.unwrap().as_ref(), Some(&named));
        self.world.builder().namespace(NAME).open().await.unwrap();
        assert_eq!(registry.delete(NAME).await.unwrap().id, named.id);
        assert_eq!(registry.get(NAME).await.unwrap(), None);
        // The namespace can be recovered, unless it was purged, and removed in any case.
        match found.as_ref().map(Namespace::status) {
            Some(NamespaceStatus::Active | NamespaceStatus::Deleted) => {
                registry.recover(&self.id).await.unwrap();
                assert_eq!(
                    registry.get(NAME).await.unwrap().map(|it| it.id),
                    Some(self.id.clone())
                );
                registry.delete(NAME).await.unwrap();
            }
            Some(NamespaceStatus::Purging) => {
                let purged = registry.recover(&self.id).await;
                assert!(matches!(purged, Err(Error::NamespacePurged { .. })), "{purged:?}");
            }
            None => return,
        }
        registry.purge(&self.id, |_| {}).await.unwrap();
        assert_eq!((registry.by_id(&self.id).await.unwrap(), self.items().await), (None, 0));
    }
}

/// Runs a schedule and returns the clients that have not ended.
async fn race(scene: &Scene, ops: &[Op], schedule: &[usize]) -> Vec<usize> {
    let mut clients = Vec::new();
    for (at, op) in ops.iter().enumerate() {
        let seed = 100 + at as u64;
        clients.push(Client::new(&scene.world, *op, scene.id.clone(), seed).await);
    }
    for at in schedule {
        clients[*at].advance().await;
    }
    // A client that was told that the namespace is back does not lose it, unless another deletes it.
    for (op, client) in ops.iter().zip(&clients) {
        if *op == Op::Recover && !ops.contains(&Op::Delete) && matches!(client.result, Some(Ok(())))
        {
            let found = scene.registry.by_id(&scene.id).await.unwrap();
            assert_eq!(found.map(|it| it.status()), Some(NamespaceStatus::Active));
        }
    }
    let ended = |at: &usize| clients[*at].work.is_none();
    (0..clients.len()).filter(|at| !ended(at)).collect()
}

/// Says where a test failed.
struct Failed<'a>(Start, &'a [Op], &'a [usize]);

impl Drop for Failed<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?}, clients {:?}, schedule {:?}", self.0, self.1, self.2);
        }
    }
}

#[test]
fn two_clients_in_every_interleaving_and_cut_off_anywhere_leave_a_usable_name() {
    let mut runs = 0_u32;
    for start in STARTS {
        for one in OPS {
            for other in OPS.into_iter().filter(|other| *other >= one) {
                let ops = [one, other];
                let schedules = RefCell::new(vec![Vec::new()]);
                loop {
                    let Some(schedule) = schedules.borrow_mut().pop() else { break };
                    on(Kind::Memory, async |world| {
                        let _failed = Failed(start, &ops, &schedule);
                        let scene = Scene::new(world, start).await;
                        for next in race(&scene, &ops, &schedule).await {
                            let mut longer = schedule.clone();
                            longer.push(next);
                            assert!(longer.len() < 40, "a client does not end");
                            schedules.borrow_mut().push(longer);
                        }
                        scene.check().await;
                    });
                    runs += 1;
                }
            }
        }
    }
    assert!(runs > 10_000, "{runs}");
}

#[test]
fn three_clients_in_random_interleavings_leave_a_usable_name_on_every_store() {
    for kind in Kind::ALL {
        let rounds = if *kind == Kind::Memory { 2_000 } else { 150 };
        for seed in 0..rounds {
            let mut draws = Draws(seed);
            let start = STARTS[draws.below(STARTS.len())];
            let ops: Vec<Op> = (0..3).map(|_| OPS[draws.below(OPS.len())]).collect();
            // Often all of them end, sometimes they are cut off early.
            let schedule: Vec<usize> = (0..draws.below(60)).map(|_| draws.below(3)).collect();
            on(*kind, async |world| {
                let _failed = Failed(start, &ops, &schedule);
                let scene = Scene::new(world, start).await;
                race(&scene, &ops, &schedule).await;
                scene.check().await;
            });
        }
    }
}

/// Numbers from a seed, by splitmix64.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % bound as u64).unwrap()
    }
}

/// What a purge and a recovery of an earlier release left behind.
#[test]
fn a_name_that_points_to_nothing_is_free() {
    crate::world::on_every_store(async |world| {
        let scene = Scene::new(world, Start::NameOfNothing).await;
        assert_eq!(scene.registry.get(NAME).await.unwrap(), None);
        let opened = scene.world.builder().namespace(NAME).open().await;
        assert!(matches!(opened, Err(Error::UnknownNamespace { .. })), "{opened:?}");
        let namespace = scene.registry.register(NAME).await.unwrap();
        assert_ne!(namespace.id, scene.id);
        assert_eq!(namespace.created_at, NOW);
        scene.world.builder().namespace(NAME).open().await.unwrap();
    });
}
