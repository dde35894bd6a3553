//! The limiter, its builder, and its calls to the store.

use futures_core::future::BoxFuture;
use std::any::Any;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use zae_limiter_model::{
    EntityId, Limit, LimitSet, NamespaceId, NamespaceName, ResourceName, Timestamp,
};

use crate::background::{self, Background};
use crate::breaker::{Breaker, BreakerSettings, Gate};
use crate::cache::{CacheStats, ConfigCache, stripe};
use crate::clock::{Clock, SystemClock};
use crate::deadline::within;
use crate::entropy::Entropy;
use crate::error::{Applied, Error, StoreError, StoreErrorKind};
use crate::namespaces::Namespaces;
use crate::plan::{BucketKey, Lifetime, Origin, Source, Target};
use crate::record::{ConfigLevel, Key, OnUnavailable, Record};
use crate::skew::{Checked, ClockCheck, MAX_CLOCK_SKEW};
use crate::store::{DELETION_WAIT_MAX, Scope, Store};
use crate::waiting::Queues;

/// The most levels of a hierarchy that one call takes from, the entity itself included.
pub const LEVELS_MAX: usize = 8;

/// The most attempts of a call during an outage of the store, within its deadline.
const ATTEMPTS_MAX: u32 = 4;

/// The wait before the second attempt; it doubles from there, up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(10);

/// The longest wait between two attempts: 100 ms, a tenth of the default deadline of 1 s.
const BACKOFF_MAX: Duration = Duration::from_millis(100);

/// The attempts of one call.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    /// Those that count towards [`ATTEMPTS_MAX`].
    counted: u32,
    backoff: Option<Duration>,
    /// Whether a call to the store is in progress, and not a wait between two attempts.
    pub(crate) in_call: bool,
    /// The last error of the store.
    pub(crate) last: Option<StoreError>,
}

impl Attempts {
    /// Waits before the next attempt, or returns the error after the last one.
    ///
    /// After an outage a call is retried up to [`ATTEMPTS_MAX`] attempts. A busy bucket is retried until
    /// the deadline, because the store answers. Attempts that may have been applied always count, so that
    /// a charge is not repeated without end.
    pub(crate) async fn wait(
        &mut self,
        clock: &dyn Clock,
        error: StoreError,
    ) -> Result<(), StoreError> {
        self.in_call = false;
        if error.is_outage() || error.applied() == Applied::Maybe {
            self.counted += 1;
            if self.counted == ATTEMPTS_MAX {
                return Err(error);
            }
        }
        tracing::debug!(%error, "a call to the store failed; retrying");
        self.last = Some(error);
        let backoff = self.backoff.unwrap_or(BACKOFF);
        self.backoff = Some((backoff * 2).min(BACKOFF_MAX));
        clock.sleep(backoff).await;
        Ok(())
    }
}

/// Takes tokens from the buckets of one namespace of a store.
///
/// Cheap to clone; all clones share the configuration cache and the breaker.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// limiter.set_system_defaults([Limit::per_minute("rpm", 100)], None).await?;
///
/// let mut lease = limiter.acquire("key-1", "gpt-4").take("rpm", 1).await?;
/// lease.commit().await?;
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct RateLimiter {
    pub(crate) inner: Arc<Inner>,
    handles: Arc<[Arc<Handle>]>,
    principal: Option<Arc<str>>,
}

/// A lease's reference to its limiter. A limiter has several, each with its own reference count:
/// otherwise threads that take and drop leases would contend for one counter.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) inner: Arc<Inner>,
}

/// How many handles a limiter has: a power of two.
const HANDLES: usize = 8;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) entropy: Arc<Entropy>,
    pub(crate) namespace: NamespaceId,
    pub(crate) namespace_name: NamespaceName,
    pub(crate) settings: Settings,
    pub(crate) cache: ConfigCache,
    pub(crate) breaker: Breaker,
    pub(crate) background: Background,
    pub(crate) queues: Queues,
    pub(crate) clock_check: Arc<ClockCheck>,
    /// The last `on_unavailable` read from the store, for when the store is unavailable: 0 none, 1 allow,
    /// 2 block.
    stored_policy: AtomicU8,
    /// Whether the namespace was found to be purged.
    is_purged: AtomicBool,
}

/// The settings of a limiter; [`Builder`] documents each.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) default_limits: Arc<LimitSet>,
    pub(crate) on_unavailable: Option<OnUnavailable>,
    pub(crate) deadline: Duration,
    pub(crate) admin_deadline: Duration,
    pub(crate) lifetime_multiplier: u32,
    pub(crate) audit_retention: Option<Duration>,
}

/// Builds a [`RateLimiter`].
///
/// ```
/// # use std::time::Duration;
/// # use zae_limiter_core::{Limit, MemoryStore, OnUnavailable, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let limiter = RateLimiter::builder(MemoryStore::new())
///     .default_limits([Limit::per_minute("rpm", 100)])
///     .on_unavailable(OnUnavailable::Allow)
///     .deadline(Duration::from_millis(200))
///     .open()
///     .await?;
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug)]
pub struct Builder {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    entropy: Option<Entropy>,
    namespace: String,
    principal: Option<Arc<str>>,
    limits: Vec<Limit>,
    settings: Settings,
    cache_ttl: Duration,
    cache_capacity: usize,
    breaker: BreakerSettings,
    background: Background,
    max_clock_skew: Duration,
}

impl Builder {
    fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            clock: Arc::new(SystemClock),
            entropy: None,
            namespace: "default".to_owned(),
            principal: None,
            limits: Vec::new(),
            settings: Settings {
                default_limits: Arc::default(),
                on_unavailable: None,
                deadline: Duration::from_secs(1),
                admin_deadline: Duration::from_secs(10),
                lifetime_multiplier: 7,
                audit_retention: None,
            },
            cache_ttl: Duration::from_secs(60),
            cache_capacity: 100_000,
            breaker: BreakerSettings::default(),
            background: Background::default(),
            max_clock_skew: MAX_CLOCK_SKEW,
        }
    }

    /// The namespace, by name (`default`). `default` is registered on first use. Every other one must be
    /// registered before.
    #[must_use]
    pub fn namespace(mut self, name: impl Into<String>) -> Self {
        self.namespace = name.into();
        self
    }

    /// The limits to use if the store has none at any level.
    #[must_use]
    pub fn default_limits(mut self, limits: impl IntoIterator<Item = Limit>) -> Self {
        self.limits = limits.into_iter().collect();
        self
    }

    /// What happens to calls while the store is unavailable. It overrides the setting stored at system
    /// level. If neither is set, calls fail.
    #[must_use]
    pub fn on_unavailable(mut self, policy: OnUnavailable) -> Self {
        self.settings.on_unavailable = Some(policy);
        self
    }

    /// The deadline of an acquire, including retries (1 s).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// The deadline of one step of any other call (10 s). Waits of a deletion or a purge for the indexes of a table do not
    /// count.
    #[must_use]
    pub fn admin_deadline(mut self, deadline: Duration) -> Self {
        self.settings.admin_deadline = deadline;
        self
    }

    /// How long stored limits are cached (60 s). With zero, every call reads them.
    #[must_use]
    pub fn cache_ttl(mut self, ttl: Duration) -> Self {
        self.cache_ttl = ttl;
        self
    }

    /// The most pairs of entity and resource in the cache (100,000).
    #[must_use]
    pub fn cache_capacity(mut self, entries: usize) -> Self {
        self.cache_capacity = entries;
        self
    }

    /// When the circuit breaker opens.
    #[must_use]
    pub fn breaker(mut self, settings: BreakerSettings) -> Self {
        self.breaker = settings;
        self
    }

    /// How long a bucket under default limits is kept after its last use, in multiples of the time to
    /// fill it (7). With zero it never expires.
    #[must_use]
    pub fn bucket_lifetime(mut self, times_to_fill: u32) -> Self {
        self.settings.lifetime_multiplier = times_to_fill;
        self
    }

    /// How long audit events of this limiter's changes are kept. It overrides the setting stored at system
    /// level. If neither is set, 90 days.
    #[must_use]
    pub fn audit_retention(mut self, retention: Duration) -> Self {
        self.settings.audit_retention = Some(retention);
        self
    }

    /// The name of the actor in audit events.
    #[must_use]
    pub fn principal(mut self, principal: impl Into<String>) -> Self {
        self.principal = Some(principal.into().into());
        self
    }

    /// How far the clock may jump while the process runs (2 minutes). After a longer jump, calls use the time before it
    /// plus the time that has passed, until the clock has kept its new time for five minutes. A refill time further
    /// ahead than this, which a wrong clock has left in a store, is rewound. Zero switches both off.
    ///
    /// A DynamoDB store compares the clock with the table's time instead, within a bound of its own
    /// (`DynamoOptions::max_clock_skew`).
    #[must_use]
    pub fn max_clock_skew(mut self, bound: Duration) -> Self {
        self.max_clock_skew = bound;
        self
    }

    /// Another clock, for tests and simulations.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Another source of random ids, for tests and simulations.
    #[must_use]
    pub fn entropy(mut self, entropy: Entropy) -> Self {
        self.entropy = Some(entropy);
        self
    }

    /// Passes background work, which refunds dropped leases, to `spawn`: for tests and simulations. By
    /// default it runs on the limiter's own thread.
    #[must_use]
    pub fn background(
        mut self,
        spawn: impl Fn(BoxFuture<'static, ()>) + Send + Sync + 'static,
    ) -> Self {
        self.background = Background::elsewhere(spawn);
        self
    }

    /// Looks up the namespace and opens the limiter.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownNamespace`]; [`Error::Invalid`] for a name or a limit that breaks a rule;
    /// [`Error::Unavailable`] or [`Error::Store`] when the store cannot be read.
    pub async fn open(mut self) -> Result<RateLimiter, Error> {
        let name = NamespaceName::new(&self.namespace)?;
        self.settings.default_limits = Arc::new(LimitSet::new(self.limits)?);
        let entropy = Arc::new(self.entropy.unwrap_or_else(Entropy::from_os));
        let clock_check = Arc::new(ClockCheck::new(self.max_clock_skew));
        let registry = Namespaces {
            store: Arc::clone(&self.store),
            clock: Arc::clone(&self.clock),
            clock_check: Arc::clone(&clock_check),
            entropy: Arc::clone(&entropy),
            principal: self.principal.clone(),
            deadline: self.settings.admin_deadline,
            audit_retention: self.settings.audit_retention,
        };
        let namespace = registry.open(&name).await?;
        let inner = Inner {
            store: self.store,
            clock: self.clock,
            entropy,
            namespace: namespace.id.clone(),
            namespace_name: name,
            settings: self.settings,
            cache: ConfigCache::new(&namespace.id, self.cache_ttl, self.cache_capacity),
            breaker: Breaker::new(self.breaker),
            background: self.background,
            queues: Queues::default(),
            clock_check,
            stored_policy: AtomicU8::new(0),
            is_purged: AtomicBool::new(false),
        };
        Ok(RateLimiter::new(Arc::new(inner), HANDLES, self.principal))
    }
}

impl RateLimiter {
    /// A builder for a limiter on a store. An `Arc` of a store is a store, too.
    pub fn builder(store: impl Store) -> Builder {
        Builder::new(shared(store))
    }

    /// The name of the limiter's namespace.
    pub fn namespace(&self) -> &NamespaceName {
        &self.inner.namespace_name
    }

    /// The id of the limiter's namespace.
    pub fn namespace_id(&self) -> &NamespaceId {
        &self.inner.namespace
    }

    /// The limiter's store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// The limiter's clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.inner.clock
    }

    /// The time that calls use: that of the clock, [corrected](Builder::max_clock_skew) if the clock is wrong.
    pub fn now(&self) -> Timestamp {
        self.inner.now().now
    }

    /// The same limiter with another actor in the audit events of its changes.
    #[must_use]
    pub fn acting_as(&self, principal: impl Into<String>) -> Self {
        Self { principal: Some(principal.into().into()), ..self.clone() }
    }

    /// A limiter for internal calls, which write no audit events.
    pub(crate) fn from_inner(inner: &Arc<Inner>) -> Self {
        Self::new(Arc::clone(inner), 1, None)
    }

    fn new(inner: Arc<Inner>, handles: usize, principal: Option<Arc<str>>) -> Self {
        let handle = || Arc::new(Handle { inner: Arc::clone(&inner) });
        let handles = (0..handles).map(|_| handle()).collect();
        Self { inner, handles, principal }
    }

    /// This thread's handle.
    pub(crate) fn handle(&self) -> &Arc<Handle> {
        self.handle_of(stripe())
    }

    /// The handle of a thread with this [`stripe`].
    #[inline]
    pub(crate) fn handle_of(&self, stripe: usize) -> &Arc<Handle> {
        // As the remainder, and cheaper. A limiter for internal calls has only one.
        self.handles.get(stripe & (HANDLES - 1)).unwrap_or(&self.handles[0])
    }

    /// The namespaces of the store.
    pub fn namespaces(&self) -> Namespaces {
        Namespaces {
            store: Arc::clone(&self.inner.store),
            clock: Arc::clone(&self.inner.clock),
            clock_check: Arc::clone(&self.inner.clock_check),
            entropy: Arc::clone(&self.inner.entropy),
            principal: self.principal.clone(),
            deadline: self.inner.settings.admin_deadline,
            audit_retention: self.inner.settings.audit_retention,
        }
    }

    /// The counters of the configuration cache.
    pub fn cache_stats(&self) -> CacheStats {
        self.inner.cache.stats()
    }

    /// Clears the configuration cache, so that the next calls read the stored limits.
    pub fn invalidate_cache(&self) {
        self.inner.cache.invalidate_all();
    }

    /// Checks that the store answers.
    ///
    /// # Errors
    ///
    /// The store's error; [`Error::Unavailable`] when it does not answer within the deadline.
    pub async fn ping(&self) -> Result<(), Error> {
        let key = [Key::Namespace(self.inner.namespace.clone())];
        self.inner.call(self.inner.store.get(&key)).await.map(|_| ())
    }
}

/// Puts the store behind an `Arc`, unless it is one already: that saves an indirection.
fn shared<S: Store>(store: S) -> Arc<dyn Store> {
    let mut store = Some(store);
    match (&mut store as &mut dyn Any).downcast_mut::<Option<Arc<dyn Store>>>() {
        Some(shared) => shared.take().expect("set above"),
        None => Arc::new(store.expect("set above")),
    }
}

/// Calls a store within a deadline.
pub(crate) async fn call_store<T>(
    clock: &dyn Clock,
    deadline: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, Error> {
    let started = clock.stopwatch();
    let cause = match within(clock, deadline, call).await {
        Some(Ok(answer)) => return Ok(answer),
        Some(Err(error)) if !error.is_transient() => return Err(Error::Store(error)),
        Some(Err(cause)) => cause,
        None => no_answer(),
    };
    let waited = clock.stopwatch().saturating_sub(started);
    Err(Error::Unavailable { waited, cause })
}

pub(crate) fn no_answer() -> StoreError {
    let message = "the store gave no answer before the deadline";
    StoreError::new(StoreErrorKind::Unavailable, message).maybe_applied()
}

impl Inner {
    /// Reads the clock, once per call, and corrects it if it is wrong.
    #[inline(always)]
    pub(crate) fn now(&self) -> Checked {
        let forget = || self.cache.forget();
        self.clock_check.now(&*self.clock, &*self.store, Some(forget))
    }

    /// Calls the store within the deadline of an administrative step.
    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, Error> {
        self.call_within(self.settings.admin_deadline, call).await
    }

    /// Calls [`Store::note_deletion`], which may wait on purpose.
    pub(crate) async fn note_deletion(&self, scope: &Scope) -> Result<(), Error> {
        let deadline = self.settings.admin_deadline.saturating_add(DELETION_WAIT_MAX);
        self.call_within(deadline, self.store.note_deletion(scope, self.now().now)).await
    }

    async fn call_within<T>(
        &self,
        deadline: Duration,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, Error> {
        self.check_purged()?;
        let result = call_store(&*self.clock, deadline, call).await;
        // A read may just have found out.
        if result.is_err() {
            self.check_purged()?;
        }
        result
    }

    /// Fails if the namespace is known to be purged. It stays so: ids are never used twice.
    pub(crate) fn check_purged(&self) -> Result<(), Error> {
        match self.is_purged.load(Ordering::Relaxed) {
            true => Err(Error::NamespacePurged { name: self.namespace_name.clone() }),
            false => Ok(()),
        }
    }

    /// Fails unless the records of a read contain the namespace, and no purge of it has begun. A soft-deleted
    /// namespace stays usable.
    pub(crate) fn require_namespace<'a>(
        &self,
        records: impl IntoIterator<Item = &'a Record>,
    ) -> Result<(), Error> {
        let usable = |record: &Record| matches!(record, Record::Namespace(it) if !it.is_purging);
        if !records.into_iter().any(usable) {
            self.is_purged.store(true, Ordering::Relaxed);
            // From now on no call finds what it needs in the cache.
            self.cache.invalidate_all();
        }
        self.check_purged()
    }

    /// What happens to a call while the store is unavailable.
    pub(crate) fn policy(&self, of_call: Option<OnUnavailable>) -> OnUnavailable {
        let stored = match self.stored_policy.load(Ordering::Relaxed) {
            1 => Some(OnUnavailable::Allow),
            2 => Some(OnUnavailable::Block),
            _ => None,
        };
        of_call.or(self.settings.on_unavailable).or(stored).unwrap_or(OnUnavailable::Block)
    }

    pub(crate) fn remember_policy(&self, policy: Option<OnUnavailable>) {
        let code = match policy {
            None => 0,
            Some(OnUnavailable::Allow) => 1,
            Some(OnUnavailable::Block) => 2,
        };
        if self.stored_policy.load(Ordering::Relaxed) != code {
            self.stored_policy.store(code, Ordering::Relaxed);
        }
    }

    /// Fails while the circuit breaker is open.
    pub(crate) fn gate(self: &Arc<Self>) -> Result<(), StoreError> {
        let gate = self.breaker.gate(self.clock.stopwatch());
        if gate == Gate::Closed {
            return Ok(());
        }
        if gate == Gate::OpenAndProbe {
            self.probe_in_background();
        }
        let failures = self.breaker.failures();
        let message = format!("the store failed {failures} times in a row and is being probed");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    async fn probe(&self) {
        // Dropped also when the runtime ends before the probe: then the next call probes again.
        let _probing = self.breaker.probing();
        let key = [Key::Namespace(self.namespace.clone())];
        let deadline = self.settings.deadline;
        // The cooldown counts from the start of this probe: after a probe that timed out, the next one
        // starts soon, and a store that has recovered serves again.
        let began = self.clock.stopwatch();
        match within(&*self.clock, deadline, self.store.get(&key)).await {
            Some(Ok(_)) => self.breaker.succeeded(),
            Some(Err(error)) if !error.is_outage() => self.breaker.succeeded(),
            Some(Err(_)) | None => self.breaker.probe_failed(began),
        }
    }

    fn probe_in_background(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        // If the probe ends with the caller's runtime, the next call starts another one.
        background::carry_out_here(async move { inner.probe().await });
    }

    /// Reports the result of a call to the breaker. An error that concerns one bucket, or the call itself,
    /// does not count: some come from queues in this process. A lost answer does not count either: a probe
    /// finds out whether the store answers.
    pub(crate) fn note<T>(self: &Arc<Self>, answer: &Result<T, StoreError>) {
        match answer {
            Ok(_) => self.breaker.succeeded(),
            Err(error) if error.is_outage() && error.applied() == Applied::Maybe => {
                self.note_cut_off();
            }
            Err(error) if error.is_outage() => self.breaker.failed(self.clock.stopwatch()),
            Err(_) => {}
        }
    }

    /// Reports to the breaker that a call ran into its deadline. Either the store does not answer, or the
    /// deadline was too short: a probe finds out.
    pub(crate) fn note_cut_off(self: &Arc<Self>) {
        if self.breaker.suspect() {
            self.probe_in_background();
        }
    }

    /// The bucket and limits of an entity on a resource, from the cache or by one read. The limits are
    /// empty if there are none at any level.
    pub(crate) async fn resolve(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        now: Timestamp,
    ) -> Result<Arc<Target>, StoreError> {
        if let Some(found) = self.cache.get(entity.as_str(), resource.as_str(), now) {
            return Ok(found);
        }
        // Boxed: it is rare and large, and would grow the future of every call.
        let load = async || self.load(entity, resource, now).await;
        Box::pin(self.cache.get_or_load(entity, resource, now, load)).await
    }

    /// Reads the limits of an entity on a resource from the store, bypassing the cache.
    pub(crate) async fn load(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        now: Timestamp,
    ) -> Result<Target, StoreError> {
        let config = |level| Key::Config(self.namespace.clone(), level);
        // From the most specific level to the least, and the entity itself.
        let mut keys = vec![
            config(ConfigLevel::EntityResource(entity.clone(), resource.clone())),
            config(ConfigLevel::Entity(entity.clone())),
            config(ConfigLevel::Resource(resource.clone())),
            config(ConfigLevel::System),
            Key::Entity(self.namespace.clone(), entity.clone()),
        ];
        let checks_namespace = self.cache.is_namespace_due(now);
        if checks_namespace {
            keys.push(Key::Namespace(self.namespace.clone()));
        }
        let mut configs = Vec::new();
        let mut parent = None;
        let found: Vec<Record> = self.store.get(&keys).await?.into_iter().flatten().collect();
        if checks_namespace {
            self.note_namespace(&found, now)?;
        }
        for record in found {
            match record {
                Record::Config(config) => configs.push(config),
                Record::Entity(entity) if entity.cascade => parent = entity.parent,
                _ => {}
            }
        }
        let system = configs.iter().find(|config| config.level == ConfigLevel::System);
        self.remember_policy(system.and_then(|config| config.on_unavailable));
        let stored = configs.into_iter().find(|config| !config.limits.is_empty());
        let source = match stored.as_ref().map(|config| &config.level) {
            Some(ConfigLevel::EntityResource(..)) => Source::EntityResource,
            Some(ConfigLevel::Entity(_)) => Source::Entity,
            Some(ConfigLevel::Resource(_)) => Source::Resource,
            Some(ConfigLevel::System) => Source::System,
            None => Source::Limiter,
        };
        let limits = match stored {
            Some(config) => self.cache.intern_limits(config.limits),
            None => Arc::clone(&self.settings.default_limits),
        };
        let lifetime = match source {
            Source::EntityResource | Source::Entity => Lifetime::Forever,
            _ => self.idle_lifetime(&limits),
        };
        let key = self.bucket_key(entity, &self.cache.intern(resource));
        let origin = Origin { read_at: now, parent, source };
        Ok(Target::resolved(key, limits, lifetime, origin))
    }

    /// Reads the namespace, and fails if it is gone. A store that does not answer is for the next call to report.
    pub(crate) async fn look_for_namespace(&self, now: Timestamp) -> Result<(), StoreError> {
        let key = [Key::Namespace(self.namespace.clone())];
        let Ok(found) = self.store.get(&key).await else { return Ok(()) };
        let found: Vec<Record> = found.into_iter().flatten().collect();
        self.note_namespace(&found, now)
    }

    /// Notes whether the namespace is among the records that were read at `now`.
    fn note_namespace(&self, found: &[Record], now: Timestamp) -> Result<(), StoreError> {
        // Callers turn it into the typed error.
        self.require_namespace(found)
            .map_err(|error| StoreError::new(StoreErrorKind::Rejected, error.to_string()))?;
        self.cache.namespace_exists(now);
        Ok(())
    }

    pub(crate) fn idle_lifetime(&self, limits: &LimitSet) -> Lifetime {
        match self.settings.lifetime_multiplier {
            0 => Lifetime::Forever,
            times => Lifetime::Idle(limits.time_to_fill().saturating_mul(times)),
        }
    }

    pub(crate) fn bucket_key(&self, entity: &EntityId, resource: &ResourceName) -> BucketKey {
        BucketKey {
            namespace: self.namespace.clone(),
            entity: entity.clone(),
            resource: resource.clone(),
        }
    }
}
