//! What the limiter asks of a store on the hot path, and what the store answers.

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

/// The address of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketKey {
    /// In which namespace.
    pub namespace: NamespaceId,
    /// Whose bucket.
    pub entity: EntityId,
    /// For which resource.
    pub resource: ResourceName,
}

/// How long a bucket is kept when nobody touches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifetime {
    /// For good: its entity has limits of its own.
    Forever,
    /// So long after the last write, and never before it is full again: then a new one is the same.
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

/// A bucket together with the limits that hold for it now. Shared between the configuration cache,
/// the plans of calls, and the store.
// In this order: what every call looks at comes first.
#[repr(C)]
pub struct Target {
    /// The entity's id once more: usual ones stand here, where comparing them needs no other memory.
    id: SmallVec<[u8; 24]>,
    limits: Arc<LimitSet>,
    origin: Origin,
    hash: u64,
    /// The lifetime in milliseconds, or [`FOREVER`]: it is added to the clock with every call.
    idle_ms: u64,
    /// Where a store in the same process may keep the bucket itself: whoever has found the limits
    /// has then found the bucket.
    slot: BucketSlot,
    key: BucketKey,
}

/// The lifetime of a bucket that is kept for good.
const FOREVER: u64 = u64::MAX;

/// How the limiter came to these limits.
#[derive(Clone, Debug)]
#[repr(C)]
pub(crate) struct Origin {
    /// When the configuration was read.
    pub(crate) read_at: Timestamp,
    /// The entity above, if what is taken is also taken there.
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
    /// The limiter's own defaults, or nothing at all.
    Limiter,
    /// The call itself: these limits were read nowhere.
    Call,
}

/// Room for a bucket of one [`MemoryStore`](crate::MemoryStore).
pub(crate) type BucketSlot = Mutex<Option<SlotEntry>>;

/// A bucket, and the store it belongs to.
#[derive(Debug)]
pub(crate) struct SlotEntry {
    pub(crate) store: u64,
    pub(crate) state: BucketState,
}

/// One seed for the process, so that a hash can be kept with its target.
static HASHING: LazyLock<foldhash::quality::RandomState> = LazyLock::new(Default::default);

/// The hash of a bucket's key within this process.
pub(crate) fn bucket_hash(namespace: &NamespaceId, entity: &str, resource: &str) -> u64 {
    let mut hasher = HASHING.build_hasher();
    // No name contains NUL: the end of one and the start of the next cannot be mistaken.
    for name in [namespace.as_str(), entity, resource] {
        hasher.write(name.as_bytes());
        hasher.write_u8(0);
    }
    hasher.finish()
}

impl Target {
    /// A bucket and limits that were read nowhere; see [`limits_read_at`](Self::limits_read_at).
    pub fn new(key: BucketKey, limits: Arc<LimitSet>, lifetime: Lifetime) -> Self {
        let unknown = Origin { read_at: Timestamp::default(), parent: None, source: Source::Call };
        Self::resolved(key, limits, lifetime, unknown)
    }

    /// The same target, with limits that were read from the stored configuration at `moment`: for tests,
    /// and for stores that make targets themselves.
    #[must_use]
    pub fn with_limits_read_at(mut self, moment: Timestamp) -> Self {
        self.origin.read_at = moment;
        if self.origin.source == Source::Call {
            self.origin.source = Source::Limiter;
        }
        self
    }

    /// A bucket and its limits as they were resolved.
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
        let hash = bucket_hash(&key.namespace, key.entity.as_str(), key.resource.as_str());
        let id = SmallVec::from_slice(key.entity.as_str().as_bytes());
        Self { limits, hash, origin, id, idle_ms, slot: BucketSlot::default(), key }
    }

    /// Which bucket.
    pub fn key(&self) -> &BucketKey {
        &self.key
    }

    /// Its limits.
    pub fn limits(&self) -> &Arc<LimitSet> {
        &self.limits
    }

    /// The moment, by the limiter's clock, after which the limits were read from the stored
    /// configuration, at whatever level; that nothing is stored and the limiter's own defaults hold was
    /// read there too. `None` for limits that the call itself brought.
    ///
    /// A store that keeps limits with its buckets can tell by it which of two configurations is the
    /// newer one.
    pub fn limits_read_at(&self) -> Option<Timestamp> {
        (self.origin.source != Source::Call).then_some(self.origin.read_at)
    }

    /// How long it is kept, in whole milliseconds.
    pub fn lifetime(&self) -> Lifetime {
        match self.idle_ms {
            FOREVER => Lifetime::Forever,
            millis => Lifetime::Idle(Duration::from_millis(millis)),
        }
    }

    /// When the bucket expires if it was written at `now`.
    pub fn expiry(&self, bucket: &Bucket, now: Timestamp) -> Option<Timestamp> {
        if self.idle_ms == FOREVER {
            return None;
        }
        // An idle lifetime is at least the time that these limits take from empty to full. A debt,
        // or a limit that is not among them, can take longer.
        let longer = bucket.in_debt() || bucket.limits().len() != self.limits.len();
        let full_ms = if longer { millis_rounded_up(bucket.wait_until_full(now)) } else { 0 };
        // Another process may be ahead of this call: then time counts from there.
        let idle = now.max(bucket.refilled_at()).saturating_add_millis(self.idle_ms);
        Some(idle.max(now.saturating_add_millis(full_ms)))
    }

    /// The entity above, if what is taken is also taken there.
    pub fn parent(&self) -> Option<&EntityId> {
        self.origin.parent.as_ref()
    }

    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    pub(crate) fn slot(&self) -> &BucketSlot {
        &self.slot
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether it is that entity's bucket for that resource.
    pub(crate) fn is_for(&self, entity: &str, resource: &str) -> bool {
        self.id[..] == *entity.as_bytes() && self.key.resource.as_str() == resource
    }
}

/// Targets are equal that name the same bucket with the same limits, lifetime and parent, read at the same
/// moment. What a store keeps with one of them does not count.
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
    /// The same bucket and limits. What a store keeps with this one stays with this one.
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
        bucket_hash(&self.namespace, self.entity.as_str(), self.resource.as_str())
    }
}

fn millis_rounded_up(wait: Duration) -> u64 {
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

/// What is asked of the limits of one bucket; `cell` counts in the target's limits.
pub type Takes = SmallVec<[Take; 2]>;

/// One bucket of the chain and what is asked of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The bucket.
    pub target: Arc<Target>,
    /// What is asked; each cell once, amounts not negative and within the capacity.
    pub takes: Takes,
}

/// All that one acquire asks: the entity's own bucket first, then its ancestors'.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// When it is asked.
    pub now: Timestamp,
    /// From whom; never the same bucket twice.
    pub legs: SmallVec<[Leg; 1]>,
}

/// Where in a bucket tokens were taken, in the store's own numbering. A lease hands it back when it settles.
///
/// Stores that keep a bucket in one place use the default. The DynamoDB store puts the shard's number here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Placement(u32);

impl Placement {
    /// The place with this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// Its number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Where a leg's tokens were taken, and what was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegTaken {
    /// Where the store took them from.
    pub placement: Placement,
    /// The balances of the limits that were asked, after the taking, in the order of the takes.
    pub left: SmallVec<[Millitokens; 2]>,
}

/// The answer to a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Everything was taken, one entry for each leg.
    Taken(SmallVec<[LegTaken; 1]>),
    /// Nothing was taken. The status of every limit that was asked.
    Refused(Vec<LimitStatus>),
}

/// A change to a bucket that was taken from before: positive takes more, whatever is there;
/// negative gives back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// The bucket.
    pub target: Arc<Target>,
    /// Where the store took the tokens from.
    pub placement: Placement,
    /// Signed differences; `cell` counts in the target's limits.
    pub differences: Takes,
}

/// The statuses of a leg, from the bucket as it was decided on. `exceeded` and the wait are those of
/// a request that has not been taken.
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
    fn a_call_from_behind_shortens_no_life() {
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
