//! The requests of the hot path to a store, and its answers.

use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_model::{
    Bucket, EntityId, LimitSet, LimitStatus, Millitokens, NamespaceId, ResourceName, Take,
    Timestamp,
};

use crate::bucket_state::BucketState;

/// The key of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketKey {
    /// The namespace of the bucket.
    pub namespace: NamespaceId,
    /// The owner of the bucket.
    pub entity: EntityId,
    /// The resource that the bucket is for.
    pub resource: ResourceName,
}

/// How long a bucket is kept after its last use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// It never expires: its entity has limits of its own.
    Forever,
    /// It expires this long after its last write, but not before it is full: then a new one is the same.
    Idle(Duration),
}

impl Lifetime {
    /// The longer of the two.
    pub(crate) fn max(self, other: Self) -> Self {
        match (self, other) {
            (Self::Idle(one), Self::Idle(other)) => Self::Idle(one.max(other)),
            _ => Self::Forever,
        }
    }
}

/// A bucket's key and its current limits. Shared by the configuration cache, the plans of calls, and the
/// store.
// The fields that every call reads come first.
#[repr(C)]
pub struct Target {
    /// A copy of the entity's id: short ones are stored inline, which makes comparing them faster.
    id: SmallVec<[u8; 24]>,
    limits: Arc<LimitSet>,
    origin: Origin,
    hash: u64,
    /// The lifetime in milliseconds, or [`FOREVER`]: it is added to the clock with every call.
    idle_ms: u64,
    /// Where a [`MemoryStore`](crate::MemoryStore) keeps the bucket itself, so that finding the limits also
    /// finds the bucket.
    slot: BucketSlot,
    key: BucketKey,
}

/// The lifetime of a bucket that never expires.
const FOREVER: u64 = u64::MAX;

/// Where the limiter got the limits from.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Origin {
    /// When the configuration was read.
    pub(crate) read_at: Timestamp,
    /// The parent, if the entity cascades.
    pub(crate) parent: Option<EntityId>,
    /// The level they come from.
    pub(crate) source: Source,
}

/// The level that limits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    EntityResource,
    Entity,
    Resource,
    System,
    /// The limiter's own defaults, which may be empty.
    Limiter,
    /// The call itself: the limits were not read from the store.
    Call,
}

/// The slot for a bucket of one [`MemoryStore`](crate::MemoryStore).
pub(crate) type BucketSlot = Mutex<Option<SlotEntry>>;

/// A bucket, and the store it belongs to.
#[derive(Debug)]
pub(crate) struct SlotEntry {
    pub(crate) store: u64,
    pub(crate) state: BucketState,
}

/// One seed per process, so that a target can store its hash.
static HASHING: LazyLock<foldhash::quality::RandomState> = LazyLock::new(Default::default);

/// The hash of a namespace within this process.
pub(crate) fn namespace_hash(namespace: &NamespaceId) -> u64 {
    hash_in(0, namespace.as_str())
}

/// The hash of a name below another one: of a resource below its namespace, or of an entity below these two. So calls
/// on the same resource need to hash only the entity.
#[inline]
pub(crate) fn hash_in(above: u64, name: &str) -> u64 {
    let mut hasher = HASHING.build_hasher();
    hasher.write_u64(above);
    hasher.write(name.as_bytes());
    hasher.finish()
}

impl Target {
    /// A target with limits of a call; see [`limits_read_at`](Self::limits_read_at).
    pub fn new(key: BucketKey, limits: Arc<LimitSet>, lifetime: Lifetime) -> Self {
        let unknown = Origin { read_at: Timestamp::default(), parent: None, source: Source::Call };
        Self::resolved(key, limits, lifetime, unknown)
    }

    /// A target as the cache had it, from what a prepared call remembers of it.
    pub(crate) fn remembered(
        key: BucketKey,
        limits: Arc<LimitSet>,
        read_at: Timestamp,
        idle_ms: u64,
    ) -> Self {
        let target = Self::new(key, limits, Lifetime::Forever).with_limits_read_at(read_at);
        Self { idle_ms, ..target }
    }

    /// Marks the limits as read from the stored configuration at `moment`: for tests, and for stores that
    /// make targets themselves.
    #[must_use]
    pub fn with_limits_read_at(mut self, moment: Timestamp) -> Self {
        self.origin.read_at = moment;
        if self.origin.source == Source::Call {
            self.origin.source = Source::Limiter;
        }
        self
    }

    /// A target with the origin of its limits.
    pub(crate) fn resolved(
        key: BucketKey,
        limits: Arc<LimitSet>,
        lifetime: Lifetime,
        origin: Origin,
    ) -> Self {
        let idle_ms = match lifetime {
            Lifetime::Forever => FOREVER,
            Lifetime::Idle(idle) => millis_rounded_up(idle).min(FOREVER - 1),
        };
        let hash = key.hash();
        let id = SmallVec::from_slice(key.entity.as_str().as_bytes());
        Self { limits, hash, origin, id, idle_ms, slot: BucketSlot::default(), key }
    }

    /// The key of the bucket.
    pub fn key(&self) -> &BucketKey {
        &self.key
    }

    /// The limits of the bucket.
    #[inline]
    pub fn limits(&self) -> &Arc<LimitSet> {
        &self.limits
    }

    /// When the limits were read from the stored configuration: a moment of the limiter's clock before the
    /// read. It is also set for the limiter's own defaults, because the read found no stored limits.
    /// `None` for limits of the call itself.
    ///
    /// A store that keeps limits with its buckets uses it to find the newer of two configurations.
    pub fn limits_read_at(&self) -> Option<Timestamp> {
        (self.origin.source != Source::Call).then_some(self.origin.read_at)
    }

    /// How long the bucket is kept after its last use, in whole milliseconds.
    pub fn lifetime(&self) -> Lifetime {
        match self.idle_ms {
            FOREVER => Lifetime::Forever,
            millis => Lifetime::Idle(Duration::from_millis(millis)),
        }
    }

    /// The lifetime in milliseconds, as [`remembered`](Self::remembered) takes it.
    #[inline]
    pub(crate) fn idle_ms(&self) -> u64 {
        self.idle_ms
    }

    /// When the bucket expires if it was written at `now`.
    #[inline]
    pub fn expiry(&self, bucket: &Bucket, now: Timestamp) -> Option<Timestamp> {
        if self.idle_ms == FOREVER {
            return None;
        }
        // An idle lifetime is at least the time to fill under these limits. A debt, or a limit that is not
        // among them, can take longer.
        let longer = bucket.in_debt() || bucket.limits().len() != self.limits.len();
        let full_ms = if longer { millis_rounded_up(bucket.wait_until_full(now)) } else { 0 };
        // Another process may have written later by its clock: then the lifetime counts from there.
        let idle = now.max(bucket.refilled_at()).saturating_add_millis(self.idle_ms);
        Some(idle.max(now.saturating_add_millis(full_ms)))
    }

    /// The parent, if the entity cascades.
    #[inline]
    pub fn parent(&self) -> Option<&EntityId> {
        self.origin.parent.as_ref()
    }

    #[inline]
    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    #[inline]
    pub(crate) fn slot(&self) -> &BucketSlot {
        &self.slot
    }

    #[inline]
    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether it is the entity's bucket for the resource.
    #[inline]
    pub(crate) fn is_for(&self, entity: &str, resource: &str) -> bool {
        let own = self.key.resource.as_str();
        // Most often both are the same shared copy: see `ConfigCache::intern`.
        self.id[..] == *entity.as_bytes() && (std::ptr::eq(own, resource) || own == resource)
    }
}

/// Targets are equal if they have the same key, limits, lifetime and parent, read at the same moment. The slot
/// does not count.
impl PartialEq for Target {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
            && self.limits == other.limits
            && self.idle_ms == other.idle_ms
            && self.parent() == other.parent()
            && self.limits_read_at() == other.limits_read_at()
    }
}

impl Eq for Target {}

impl Clone for Target {
    /// Copies everything but the slot, which is empty in the copy.
    fn clone(&self) -> Self {
        Self {
            id: self.id.clone(),
            limits: Arc::clone(&self.limits),
            origin: self.origin.clone(),
            hash: self.hash,
            idle_ms: self.idle_ms,
            slot: BucketSlot::default(),
            key: self.key.clone(),
        }
    }
}

impl BucketKey {
    /// The key's hash within this process.
    pub(crate) fn hash(&self) -> u64 {
        let above = hash_in(namespace_hash(&self.namespace), self.resource.as_str());
        hash_in(above, self.entity.as_str())
    }
}

pub(crate) fn millis_rounded_up(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("key", &self.key)
            .field("limits", &self.limits)
            .field("lifetime", &self.lifetime())
            .finish()
    }
}

/// Amounts for the limits of one bucket; `cell` is an index into the target's limits.
pub type Takes = SmallVec<[Take; 2]>;

/// One bucket of the chain, and the amounts to take from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The bucket and its limits.
    pub target: Arc<Target>,
    /// The amounts: each cell once, not negative, within the capacity.
    pub takes: Takes,
}

/// One acquire: the entity's own bucket first, then its ancestors'.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The moment of the acquire.
    pub now: Timestamp,
    /// A store without a time of its own rewinds a refill time that is more than this after `now`: the clock was ahead
    /// before, and is right now. `None` if `now` is no proof of that.
    pub max_skew: Option<Duration>,
    /// The buckets, each at most once.
    pub legs: SmallVec<[Leg; 1]>,
}

/// An acquire from one bucket, as [`Store::take_now`](crate::Store::take_now) gets it.
#[derive(Clone, Copy, Debug)]
pub struct SingleLeg<'a> {
    /// The moment of the acquire.
    pub now: Timestamp,
    /// The bucket and its limits.
    pub target: &'a Target,
    /// The amounts: each cell once, not negative, within the capacity.
    pub takes: &'a [Take],
}

/// Where in a bucket tokens were taken, in the store's own numbering. A lease passes it to the store when it settles.
///
/// Stores that keep a bucket in one place use the default. The DynamoDB store uses the number of the shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement(u32);

impl Placement {
    /// The placement with this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Where a leg's tokens were taken, and the balances after that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegTaken {
    /// Where the store took them from.
    pub placement: Placement,
    /// The balances after taking, in the order of the leg's takes.
    pub left: SmallVec<[Millitokens; 2]>,
}

/// The answer to a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// All amounts were taken. One entry for each leg.
    Taken(SmallVec<[LegTaken; 1]>),
    /// Nothing was taken. The status of every limit of the plan.
    Refused(Vec<LimitStatus>),
}

/// A change to a bucket after an acquire. A positive difference charges, whatever the balance is; a negative
/// one refunds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// The bucket and its limits.
    pub target: Arc<Target>,
    /// Where the store took the tokens.
    pub placement: Placement,
    /// Signed differences; `cell` is an index into the target's limits.
    pub differences: Takes,
}

/// The statuses of a refused leg, from the bucket that the decision was made on.
pub fn refused_statuses(
    level: usize,
    leg: &Leg,
    bucket: &Bucket,
    now: Timestamp,
) -> impl Iterator<Item = LimitStatus> {
    leg.takes.iter().filter_map(move |take| {
        let name = &leg.target.limits().names()[take.cell];
        let at = bucket.limits().position(name.as_str())?;
        let (cell, rate) = (bucket.cells()[at], bucket.limits().rates()[at]);
        let retry_after = bucket.wait_for(at, take.amount, now);
        Some(LimitStatus {
            entity_id: leg.target.key().entity.clone(),
            level,
            resource: leg.target.key().resource.clone(),
            limit_name: name.clone(),
            rate,
            available: cell.tokens,
            requested: take.amount,
            exceeded: !retry_after.is_zero(),
            retry_after,
            full_after: bucket.wait_for(at, rate.capacity(), now),
        })
    })
}

#[cfg(test)]
mod tests {
    use zae_limiter_model::Limit;

    use super::*;

    #[test]
    fn a_lagging_clock_never_shortens_the_expiry() {
        let key = BucketKey {
            namespace: NamespaceId::new("ns000000001").expect("a valid id"),
            entity: EntityId::new("org").expect("a valid id"),
            resource: ResourceName::new("gpt-4").expect("a valid name"),
        };
        let limits = Arc::new(LimitSet::new([Limit::per_minute("rpm", 10)]).expect("valid limits"));
        let minute = Lifetime::Idle(Duration::from_secs(60));
        let target = Target::new(key, Arc::clone(&limits), minute);
        // Emptied at 10 s, by another process: it is full at 70 s, and not before.
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1_000);
        let mut bucket = Bucket::full(limits, at(10));
        bucket.charge(0, Millitokens::new(10_000)).expect("it fits");
        assert_eq!(target.expiry(&bucket, at(9)), Some(at(70)));
        assert_eq!(target.expiry(&bucket, at(11)), Some(at(71)));
    }
}
