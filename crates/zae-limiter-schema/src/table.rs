//! The calls that a store makes to its table. The SDK's adapter and the simulated table implement them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use zae_limiter_core::{Applied, BoxFuture};

use crate::bucket::BucketItem;
use crate::dates::TableTime;
use crate::expression::{Action, Condition};
use crate::keys::{BucketItemKey, Index, ItemKey};
use crate::value::{Item, Malformed};

/// The most items that one page of a query asks for.
pub const PAGE_ITEMS_MAX: usize = 1_000;

/// A background task.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send + 'static>>;

/// The capacity that a call consumed, indexes included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Consumed {
    /// Write units.
    pub write: f64,
    /// Read units.
    pub read: f64,
}

impl std::ops::AddAssign for Consumed {
    fn add_assign(&mut self, other: Self) {
        self.write += other.write;
        self.read += other.read;
    }
}

/// A conditional update of one item. It creates the item if there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// The item to update.
    pub key: ItemKey,
    /// The changes. Never empty.
    pub actions: Vec<Action>,
    /// All of these must hold. Without any, the update always happens.
    pub conditions: Vec<Condition>,
}

/// The result of an update.
#[derive(Clone, Debug, PartialEq)]
pub enum Updated<I = Item> {
    /// It was applied. The item as it is now.
    Done(I, Consumed),
    /// A condition did not hold, and nothing changed. The item as it is, if there is one.
    Unmet(Option<I>, Consumed),
}

/// A bucket's item in an answer, or why it cannot be read.
pub type Decoded = Result<BucketItem, Malformed>;

impl Updated {
    /// The same result with a decoded item.
    pub fn decode(self, key: &BucketItemKey) -> Updated<Decoded> {
        let decode = |item: &Item| BucketItem::decode(key, item);
        match self {
            Self::Done(item, consumed) => Updated::Done(decode(&item), consumed),
            Self::Unmet(item, consumed) => Updated::Unmet(item.as_ref().map(decode), consumed),
        }
    }
}

/// One change of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Updates an item.
    Update(Update),
    /// Deletes an item under conditions.
    Delete(ItemKey, Vec<Condition>),
    /// Changes nothing; the conditions must hold.
    Check(ItemKey, Vec<Condition>),
}

impl Change {
    /// The item that it is about.
    pub fn key(&self) -> &ItemKey {
        match self {
            Self::Update(update) => &update.key,
            Self::Delete(key, _) | Self::Check(key, _) => key,
        }
    }

    /// What must hold for the item.
    pub fn conditions(&self) -> &[Condition] {
        match self {
            Self::Update(update) => &update.conditions,
            Self::Delete(_, conditions) | Self::Check(_, conditions) => conditions,
        }
    }
}

/// The result of a transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Transacted {
    /// All changes were applied.
    Done(Consumed),
    /// Conditions did not hold, and nothing changed. For each change: `None` if its own conditions held,
    /// else the item as it is, if there is one.
    Unmet(Vec<Option<Option<Item>>>, Consumed),
}

/// The consistency of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// Sees every write that completed before it. Costs twice as much.
    Strong,
    /// May miss the latest writes.
    Eventual,
}

impl Consistency {
    /// The strongest that is supported: DynamoDB refuses strong reads of an index.
    pub fn freshest(index: Option<Index>) -> Self {
        if index.is_some() { Self::Eventual } else { Self::Strong }
    }
}

/// Items in no particular order, without those that do not exist.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchRead {
    /// The items that exist.
    pub items: Vec<Item>,
    /// The capacity consumed.
    pub consumed: Consumed,
}

/// The sort keys that a query covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Range {
    /// The whole partition.
    All,
    /// Those with this prefix.
    StartsWith(String),
    /// From the first to the second, both included.
    Between(String, String),
}

/// The order in which a query reads a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// By ascending sort key.
    Forward,
    /// By descending sort key.
    Backward,
}

/// One page of a partition, of the table or of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// The index to read; `None` reads the table itself.
    pub index: Option<Index>,
    /// The partition key.
    pub partition: String,
    /// The sort keys.
    pub range: Range,
    /// The order.
    pub step: Step,
    /// The most items to return, 1 to [`PAGE_ITEMS_MAX`].
    pub limit: usize,
    /// The key after which the page starts: the `next` of the page before.
    pub after: Option<Item>,
    /// [`Consistency::Eventual`] for an index, or DynamoDB refuses the query.
    pub consistency: Consistency,
}

/// The result of a [`Query`].
#[derive(Clone, Debug, PartialEq)]
pub struct QueryOutput {
    /// The items in order. An index that projects only keys returns only keys.
    pub items: Vec<Item>,
    /// The key after which the next page starts; `None` on the last page.
    pub next: Option<Item>,
    /// The capacity consumed.
    pub consumed: Consumed,
}

/// A page of the whole table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scanned {
    /// The items, in no particular order.
    pub items: Vec<Item>,
    /// The key after which the next page starts; `None` on the last page.
    pub next: Option<ItemKey>,
    /// The capacity consumed.
    pub consumed: Consumed,
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableErrorKind {
    /// The table is unreachable, did not answer in time, or failed internally.
    Unavailable,
    /// The table or account is throttled.
    Throttled,
    /// One partition is throttled; other keys are not.
    PartitionThrottled,
    /// Another transaction is in progress on the same item.
    Conflict,
    /// Credentials are missing, invalid or expired, or lack a permission.
    Denied,
    /// The table does not exist.
    NoTable,
    /// The table is not a limiter's, or its format is of a later release.
    Incompatible,
    /// The call is invalid. Retrying does not help.
    Rejected,
}

/// A failed call.
#[derive(Debug)]
pub struct TableError {
    /// What the caller can do about it.
    pub kind: TableErrorKind,
    /// Whether the change may have been applied nevertheless.
    pub applied: Applied,
    /// One sentence. It contains no entity id and no item key.
    pub message: String,
    /// The underlying error.
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl TableError {
    /// An error of a call that changed nothing.
    pub fn new(kind: TableErrorKind, message: impl Into<String>) -> Self {
        Self { kind, applied: Applied::No, message: message.into(), source: None }
    }

    /// The same error for a call that may have been applied.
    #[must_use]
    pub fn maybe_applied(mut self) -> Self {
        self.applied = Applied::Maybe;
        self
    }
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TableError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

/// The calls that a store makes to its table.
///
/// An implementation never retries an update after an answer that may have been lost: only the caller
/// knows whether that is safe. It does retry what DynamoDB leaves unprocessed.
pub trait Table: fmt::Debug + Send + Sync + 'static {
    /// Updates one item.
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>>;

    /// Updates a bucket's item: every acquire on DynamoDB is one of these. An implementation can save the detour
    /// through an [`Item`]; the default makes it.
    fn update_bucket<'a>(
        &'a self,
        key: &'a BucketItemKey,
        update: Update,
    ) -> BoxFuture<'a, Result<Updated<Decoded>, TableError>> {
        Box::pin(async move { Ok(self.update(&update).await?.decode(key)) })
    }

    /// Applies at most 100 changes to different items, all or none.
    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>>;

    /// Reads any number of different items.
    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>>;

    /// Reads one page of a partition.
    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>>;

    /// Reads a page of the whole table, at most `limit` items, after a key. The default is an error: only sweeping
    /// needs it.
    fn scan<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
        limit: usize,
    ) -> BoxFuture<'a, Result<Scanned, TableError>> {
        let _ = (after, limit);
        Box::pin(async {
            let message = "this table cannot be scanned";
            Err(TableError::new(TableErrorKind::Rejected, message))
        })
    }

    /// Deletes any number of items, whether they exist or not. An error may leave some of them deleted.
    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>>;

    /// The table's own time, by the dates of its responses. The default has none.
    fn time(&self) -> TableTime {
        TableTime::Never
    }

    /// Completes after `wait`, by the table's clock.
    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()>;

    /// Completes when a call has exceeded its time limit. A simulated table without time never does.
    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        self.pause(limit)
    }

    /// Runs a task where the calls of this table run. On `Err` the store runs it on its own runtime. A
    /// simulated table runs it in the simulation.
    ///
    /// # Errors
    ///
    /// The task itself, which was not started.
    fn spawn(&self, task: Task) -> Result<(), Task> {
        Err(task)
    }
}
