//! The interface between the limiter and its store.
//!
//! The types here, in `plan` and in `record` (but `AuditAction`) are not `#[non_exhaustive]`: stores construct or match them
//! exhaustively, so that a new field or variant is a compile error and not a silent gap.

use futures_core::future::BoxFuture;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_model::{Bucket, EntityId, Millitokens, NamespaceId, ResourceName, Timestamp};

use crate::error::{StoreError, StoreErrorKind};
use crate::page::{Page, PageRequest};
use crate::plan::{Admission, BucketKey, Plan, Settlement, SingleLeg, Target};
use crate::record::{AuditSubject, Key, NamespaceStatus, Record};
use crate::window::Window;

/// The most records that one [`Store::get`] or [`Store::write`] names.
pub const BATCH_MAX: usize = 25;

/// The condition on the stored record under which a [`Write`] is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// No condition.
    Always,
    /// The record does not exist.
    Absent,
    /// The record exists.
    Present,
    /// The record is a [`Config`](crate::Config) with this version.
    Version(u64),
    /// The record is a [`Namespace`](crate::Namespace) with this status.
    Status(NamespaceStatus),
    /// The record is the name of this namespace.
    NameOf(NamespaceId),
    /// The record is an [`Entity`](crate::Entity) with this parent, or one without a parent.
    Parent(Option<EntityId>),
}

/// One change of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Creates or replaces the record.
    Put(Record, Precondition),
    /// Removes the record.
    Delete(Key, Precondition),
    /// Changes nothing; the batch fails unless the precondition holds.
    Check(Key, Precondition),
}

/// The outcome of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// All writes were made.
    Done,
    /// The precondition of the write at this index did not hold. Nothing was written.
    Conflict(usize),
}

/// Which records to list. The brackets give the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// Entities with this parent (by id).
    Children(NamespaceId, EntityId),
    /// Configurations of entities for this resource; for `_default_` if `None` (by entity).
    EntityConfigs(NamespaceId, Option<ResourceName>),
    /// Audit events (newest first).
    Audit(NamespaceId, AuditSubject),
    /// The usage of an entity, of one resource or of all, in windows that start within the range (by
    /// resource, then start).
    UsageOfEntity(NamespaceId, EntityId, Option<ResourceName>, Window, Range<Timestamp>),
    /// The usage of a resource by all entities, in windows that start within the range (by start, then
    /// entity).
    UsageOfResource(NamespaceId, ResourceName, Window, Range<Timestamp>),
    /// All namespaces, soft-deleted ones too (by id).
    Namespaces,
}

/// Which buckets to list. The brackets give the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketQuery {
    /// The buckets of an entity (by resource).
    OfEntity(NamespaceId, EntityId),
    /// The buckets on a resource (by entity).
    OnResource(NamespaceId, ResourceName),
}

/// The owner of the items to list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// An entity: its record, limits, buckets and usage, but not its audit events.
    Entity(NamespaceId, EntityId),
    /// A namespace: everything in it, except the record of the namespace.
    Namespace(NamespaceId),
}

/// Which resources to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceList {
    /// Resources with default limits.
    WithDefaults,
    /// Resources for which some entity has its own limits.
    WithEntityConfigs,
}

/// A bucket in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBucket {
    /// The key of the bucket.
    pub key: BucketKey,
    /// The balances, as of the last refill.
    pub bucket: Bucket,
    /// The moment from which the bucket counts as absent; `None` if it does not expire.
    pub expires_at: Option<Timestamp>,
}

/// When the usage records of a store include a change of its buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UsageRecording {
    /// At once: a list includes every change that was answered before it.
    Immediate,
    /// Later: an aggregator derives usage from the store's change stream.
    Deferred,
}

/// Five seconds: how long [`Store::note_deletion`] may wait on purpose.
pub const DELETION_WAIT_MAX: Duration = Duration::from_secs(5);

/// What a store says of a reading of the limiter's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeCheck {
    /// The store has no time of its own, or does not know it yet.
    Unknown,
    /// The reading differs from the store's time by no more than the store's bound.
    Within,
    /// It differs by more. This is the store's time.
    Beyond(Timestamp),
}

/// The cost of a store's calls so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Calls over the network.
    pub round_trips: u64,
    /// Billed write units, including indexes.
    pub write_units: f64,
    /// Billed read units.
    pub read_units: f64,
}

/// Keeps the limiter's state.
///
/// # Contract
///
/// *Answers and errors.* An unmet condition is an answer ([`Admission::Refused`],
/// [`Written::Conflict`]). An error means that there was no answer; [`StoreError::applied`] says
/// whether the change may still have been made.
///
/// *Time.* A store has no clock. Each call on buckets has its moment. A bucket whose expiry is not after
/// that moment counts as absent. A refill time that lies further ahead of an acquire than
/// [`Plan::max_skew`] was written by a wrong clock. The store [rewinds] it, also if it then refuses.
///
/// *Acquire* refills, checks and takes over all legs by [`decide`](zae_limiter_model::decide): from
/// all of them or from none. A store that cannot do so in one step refunds what it took from some legs
/// before it answers. An absent bucket is full. A bucket whose limits differ from the plan's [follows]
/// them. A refused plan changes nothing that a later call could observe.
///
/// *Durability.* If the store survives the end of the process, so does everything that it answered.
/// Buckets, records and usage are never half written.
///
/// *Cancellation.* A future that is dropped before its first poll has done nothing. Dropping the
/// future of an `acquire` later leaves no tokens taken: the store refunds what it may have taken, at once
/// or soon after. A `settle`, once polled, is applied even if its future is dropped. Every other change,
/// once polled, is made completely or not at all.
///
/// *Settle* never fails for lack of tokens. It first credits the time up to its moment. Each bucket's
/// differences are applied together and once.
///
/// - A *refund*, which is a negative difference, does not raise a balance above its capacity.
/// - A *charge*, which is a positive difference, counts an absent or expired bucket as full, as an acquire
///   does, and also a limit that its bucket lacks. It leaves `full - charge` under the limits of the
///   settlement's target. Refunds to these are ignored, also beside a charge.
/// - A bucket that only exists because of such a charge expires as soon as it is full again, even if the
///   target's lifetime is [`Forever`](crate::Lifetime::Forever). Its next acquire or reconfigure gives it
///   the lifetime of its target.
/// - A charge that is too large for the balance's type is [`Rejected`](crate::StoreErrorKind::Rejected). A
///   store that decides all its buckets in one step then applies nothing of the call.
///
/// *Lists* return every item that existed from the first page to the last exactly once, and use no more
/// memory than a page.
///
/// *Usage.* Net consumption is added to the windows of the change's moment. A store that keeps usage
/// itself includes in a list everything that it answered before.
///
/// `zae_limiter_testkit::conformance_tests!` checks all this for any store. `one_step_conformance_tests!`
/// adds that no reader ever sees a half-taken chain, and `usage_conformance_tests!` that usage is
/// recorded, for stores that promise this.
///
/// [follows]: zae_limiter_model::Bucket::follow
/// [rewinds]: zae_limiter_model::Bucket::rewind
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Like [`acquire`](Self::acquire), for stores that can answer without waiting. The default returns
    /// `None`.
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        let _ = plan;
        None
    }

    /// Like [`acquire_now`](Self::acquire_now), for the usual call only: from one bucket that exists, follows the
    /// target's limits, and covers the amounts. A store then takes them, writes the balances after that to `left`, one
    /// for each amount, and returns `true`; the tokens have the default [`Placement`](crate::Placement). Otherwise it
    /// changes nothing, and the limiter calls [`acquire_now`](Self::acquire_now). The default never does it.
    ///
    /// The limiter holds a lock of its cache meanwhile. So this must not wait, or call the limiter.
    fn take_now(&self, leg: &SingleLeg<'_>, left: &mut [Millitokens]) -> bool {
        let _ = (leg, left);
        false
    }

    /// Compares a reading of the limiter's clock with the store's own time, without a call. The default has none.
    fn check_time(&self, now: Timestamp) -> TimeCheck {
        let _ = now;
        TimeCheck::Unknown
    }

    /// The cost of all calls so far; `None` for a store whose calls are not billed.
    fn cost(&self) -> Option<Cost>;

    /// When usage records include a change.
    fn usage_recording(&self) -> UsageRecording;

    /// Takes all amounts of the plan, or nothing.
    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>>;

    /// Applies charges and refunds.
    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Reads buckets, in the order of the keys; absent and expired ones are `None`.
    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>>;

    /// Gives an existing bucket exactly the target's limits and lifetime. An absent one stays absent.
    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Reads at most [`BATCH_MAX`] records, in the order of the keys. Bucket keys give `None`.
    fn get<'a>(&'a self, keys: &'a [Key])
    -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>>;

    /// Makes at most [`BATCH_MAX`] writes, all or none of them.
    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>>;

    /// Removes any number of items; absent ones are skipped. It may fail halfway, and can then be called
    /// again.
    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Notes, before the items of an owner are listed and deleted, that changes made until `now` must leave no usage
    /// behind. A store that records usage [later](UsageRecording::Deferred) remembers it until it has recorded these
    /// changes. The default does nothing: for stores that record usage at once.
    ///
    /// A store may wait for up to [`DELETION_WAIT_MAX`] until its lists show the latest items. That does not count against
    /// the deadline of the limiter.
    fn note_deletion<'a>(
        &'a self,
        scope: &'a Scope,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let _ = (scope, now);
        Box::pin(async { Ok(()) })
    }

    /// Lists records.
    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>>;

    /// Lists buckets, possibly with expired ones.
    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>>;

    /// Lists the keys of all items of an owner, to delete them.
    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>>;

    /// Lists the keys of everything in the store, in any order, to find what belongs to nothing. An item that is no
    /// record is listed as the [`Key::Namespace`] that it belongs to, whether that exists or not. A tombstone is listed
    /// if it has expired at `now`. Items that are not a limiter's are not listed. A bucket may be listed more than
    /// once. The default is an error: for stores that cannot do it.
    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        let _ = (now, page);
        Box::pin(async {
            let message = "this store cannot list all its items";
            Err(StoreError::new(StoreErrorKind::Rejected, message))
        })
    }

    /// Lists resources by name.
    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>>;
}

/// A shared store: forwards every call.
#[deny(clippy::missing_trait_methods)]
impl<S: Store + ?Sized> Store for Arc<S> {
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        (**self).acquire_now(plan)
    }

    fn take_now(&self, leg: &SingleLeg<'_>, left: &mut [Millitokens]) -> bool {
        (**self).take_now(leg, left)
    }

    fn check_time(&self, now: Timestamp) -> TimeCheck {
        (**self).check_time(now)
    }

    fn cost(&self) -> Option<Cost> {
        (**self).cost()
    }

    fn usage_recording(&self) -> UsageRecording {
        (**self).usage_recording()
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        (**self).acquire(plan)
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        (**self).settle(settlements, now)
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        (**self).peek(keys, now)
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        (**self).reconfigure(target, now)
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        (**self).get(keys)
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        (**self).write(batch)
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        (**self).delete(keys)
    }

    fn note_deletion<'a>(
        &'a self,
        scope: &'a Scope,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        (**self).note_deletion(scope, now)
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        (**self).list(query, page)
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        (**self).list_buckets(query, page)
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        (**self).list_keys(scope, page)
    }

    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        (**self).list_everything(now, page)
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        (**self).list_resources(namespace, which, page)
    }
}
