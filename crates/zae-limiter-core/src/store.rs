//! The seam between the limiter and where its state is kept.

use futures_core::future::BoxFuture;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use zae_limiter_model::{Bucket, EntityId, NamespaceId, ResourceName, Timestamp};

use crate::error::StoreError;
use crate::page::{Page, PageRequest};
use crate::plan::{Admission, BucketKey, Plan, Settlement, Target};
use crate::record::{AuditSubject, Key, Record};
use crate::window::Window;

/// The most records that one [`Store::get`] or [`Store::write`] names.
pub const BATCH_MAX: usize = 25;

/// What must be true of the stored record for a [`Write`] to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precondition {
    /// Nothing.
    Always,
    /// There is no such record.
    Absent,
    /// There is one.
    Present,
    /// It is a [`Config`](crate::Config) with this version.
    Version(u64),
}

/// One change of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Stores the record in place of what is there.
    Put(Record, Precondition),
    /// Removes the record.
    Delete(Key, Precondition),
    /// Changes nothing; the batch fails unless the condition holds.
    Check(Key, Precondition),
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// All of it happened.
    Done,
    /// The condition of the write at this place did not hold, and nothing happened.
    Conflict(usize),
}

/// Which records to list. The order is that of the words in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// Entities with this parent (by id).
    Children(NamespaceId, EntityId),
    /// Entity configurations for this resource, or for `_default_` when absent (by entity).
    EntityConfigs(NamespaceId, Option<ResourceName>),
    /// Audit events (newest first).
    Audit(NamespaceId, AuditSubject),
    /// What an entity used, of one resource or of all, in windows that start within the range (by
    /// resource, then start).
    UsageOfEntity(NamespaceId, EntityId, Option<ResourceName>, Window, Range<Timestamp>),
    /// What all entities used of a resource, in windows that start within the range (by start, then
    /// entity).
    UsageOfResource(NamespaceId, ResourceName, Window, Range<Timestamp>),
    /// All namespaces, soft-deleted ones too (by id).
    Namespaces,
}

/// Which buckets to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketQuery {
    /// Those of an entity (by resource).
    OfEntity(NamespaceId, EntityId),
    /// Those on a resource (by entity).
    OnResource(NamespaceId, ResourceName),
}

/// Whose items to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// What belongs to an entity: itself, its limits, buckets and usage; not its audit events.
    Entity(NamespaceId, EntityId),
    /// Everything in a namespace, except the namespace's own record.
    Namespace(NamespaceId),
}

/// Which resources to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceList {
    /// Those with limits for everybody.
    WithDefaults,
    /// Those for which some entity has limits of its own.
    WithEntityConfigs,
}

/// A bucket as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBucket {
    /// Which bucket.
    pub key: BucketKey,
    /// Its balances, as of its last refill.
    pub bucket: Bucket,
    /// From when on it counts as absent.
    pub expires_at: Option<Timestamp>,
}

/// When the usage records of a store show a change of its buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UsageRecording {
    /// At once: the store writes usage together with the bucket.
    Immediate,
    /// Some time later: an aggregator derives usage from the store's change stream.
    Deferred,
}

/// What the calls of a store have cost, where each is billed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Calls over the network.
    pub round_trips: u64,
    /// Write units, indexes included.
    pub write_units: f64,
    /// Read units.
    pub read_units: f64,
}

/// Keeps the limiter's state.
///
/// # Contract
///
/// *Answers and errors.* An unmet condition is an answer ([`Admission::Refused`],
/// [`Written::Conflict`]). An error means that there was no answer; [`StoreError::applied`] says
/// whether the change may have been made all the same.
///
/// *Time.* A store has no clock. Each hot call brings its moment, and a bucket whose expiry is not
/// after that moment counts as absent.
///
/// *Acquire* refills, checks and takes over all legs by [`decide`](zae_limiter_model::decide): from
/// all of them or from none. A store that cannot do so in one step gives back what it took from
/// some before it answers. A bucket that is absent is full. A bucket whose limits differ from the
/// plan's [follows] them. A refused plan changes nothing that a later call could notice.
///
/// *Durability.* What was answered survives the end of the process, if the store promises to
/// survive it at all; buckets, records and usage are never half written.
///
/// *Cancellation.* A future that is dropped before its first poll has done nothing. Dropping the
/// future of an `acquire` later leaves no tokens taken: the store gives back what it may have taken,
/// if not at once then soon. A `settle`, once polled, is carried out even if its future is dropped.
/// Every other change, once polled, is carried out or not as a whole.
///
/// *Settle* never fails for lack of tokens. It first pays out the time up to its moment. Each
/// bucket's differences are applied together and once. A *refund*, which is a negative difference, does
/// not lift a balance above its capacity. A *charge*, which is a positive one, finds an absent bucket
/// full, as an acquire does: on a bucket that is absent or has expired, and on a limit that its bucket
/// lacks, it leaves `full - charge` under the limits of the settlement's target. Refunds are passed over
/// there, also beside a charge. A bucket that only exists because of such a charge expires as soon as it
/// is full again, even if the target's lifetime is [`Forever`](crate::Lifetime::Forever); its next
/// acquire or reconfigure gives it the lifetime of its target. A charge that is too large for the
/// balance's type is [`Rejected`](crate::StoreErrorKind::Rejected), and nothing of the call is applied
/// by a store that decides all its buckets in one step.
///
/// *Lists* name every item that was there from the first page to the last exactly once, and use no
/// more memory than a page.
///
/// *Usage.* Net consumption is booked to the windows of the moment the change carries. A store
/// that keeps usage itself shows in a list all that was answered before it.
///
/// `zae_limiter_testkit::conformance_tests!` checks all this for any store;
/// `one_step_conformance_tests!` adds that nobody ever sees a chain half taken, and
/// `usage_conformance_tests!` that usage is booked, for stores that promise so.
///
/// [follows]: zae_limiter_model::Bucket::follow
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Like [`acquire`](Self::acquire), for stores that can answer without waiting; the others
    /// leave this as it is.
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        let _ = plan;
        None
    }

    /// What all calls so far have cost; `None` for a store whose calls are not billed.
    fn cost(&self) -> Option<Cost>;

    /// When usage records show a change.
    fn usage_recording(&self) -> UsageRecording;

    /// Takes all that is asked, or nothing.
    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>>;

    /// Applies differences to buckets that were taken from before: charges and refunds.
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

    /// Makes at most [`BATCH_MAX`] changes, all or none of them.
    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>>;

    /// Removes any number of items; those that are not there are passed over. It may stop halfway
    /// with an error, and can then be called again.
    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Lists records.
    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>>;

    /// Lists buckets; expired ones may be among them.
    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>>;

    /// Lists the keys of all that belongs together, for its removal.
    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>>;

    /// Lists resources by name.
    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>>;
}

/// A shared store is a store: every call goes to the one behind the `Arc`.
#[deny(clippy::missing_trait_methods)]
impl<S: Store + ?Sized> Store for Arc<S> {
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        (**self).acquire_now(plan)
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

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        (**self).list_resources(namespace, which, page)
    }
}
