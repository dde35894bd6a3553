//! Calls of a store that must succeed.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::{
    Admission, Bucket, BucketKey, BucketQuery, Key, Leg, LegTaken, LimitStatus, Millitokens,
    PAGE_MAX, Page, PageRequest, Plan, Query, Record, ResourceList, Scope, Settlement, Store,
    StoreError, StoredBucket, Timestamp, Write, Written,
};

use crate::given::{plan, test_namespace};

/// The page sizes with which every list is read.
pub(crate) const PAGE_SIZES: [usize; 4] = [1, 2, 7, PAGE_MAX];

/// The most pages of a list. A list with more is considered endless.
const PAGES_MAX: usize = 20_000;

pub(crate) async fn acquire(store: &dyn Store, plan: &Plan) -> Admission {
    store.acquire(plan).await.expect("acquire must succeed")
}

/// An acquire that must be admitted.
pub(crate) async fn take(
    store: &dyn Store,
    now: Timestamp,
    legs: impl IntoIterator<Item = Leg>,
) -> SmallVec<[LegTaken; 1]> {
    match acquire(store, &plan(now, legs)).await {
        Admission::Taken(legs) => legs,
        Admission::Refused(statuses) => panic!("must be admitted, was refused: {statuses:#?}"),
    }
}

/// An acquire that must be refused.
pub(crate) async fn be_refused(
    store: &dyn Store,
    now: Timestamp,
    legs: impl IntoIterator<Item = Leg>,
) -> Vec<LimitStatus> {
    match acquire(store, &plan(now, legs)).await {
        Admission::Refused(statuses) => statuses,
        Admission::Taken(legs) => panic!("must be refused, was admitted: {legs:#?}"),
    }
}

pub(crate) async fn settle(
    store: &dyn Store,
    now: Timestamp,
    settlements: impl IntoIterator<Item = Settlement>,
) {
    let settlements: Vec<Settlement> = settlements.into_iter().collect();
    store.settle(&settlements, now).await.expect("settle must succeed");
}

/// The bucket, refilled up to `now`: a store may or may not do that itself.
pub(crate) async fn peek(store: &dyn Store, key: &BucketKey, now: Timestamp) -> Option<Bucket> {
    let keys = [key.clone()];
    let mut found = store.peek(&keys, now).await.expect("peek must succeed");
    assert_eq!(found.len(), 1, "one result for each key");
    let mut bucket = found.remove(0)?;
    bucket.refill(now);
    Some(bucket)
}

/// All that a caller can see of a bucket. Which usage is booked is internal to the store.
pub(crate) fn seen(bucket: &Bucket) -> impl PartialEq + Debug + use<> {
    let cells = bucket.cells().iter().map(|cell| (cell.tokens, cell.remainder, cell.consumed));
    (Arc::clone(bucket.limits()), cells.collect::<Vec<_>>(), bucket.refilled_at())
}

/// The balance of a limit. `None` if the bucket or the limit does not exist.
pub(crate) async fn balance(
    store: &dyn Store,
    key: &BucketKey,
    limit: &str,
    now: Timestamp,
) -> Option<Millitokens> {
    let bucket = peek(store, key, now).await?;
    bucket.cell(limit).map(|(cell, _)| cell.tokens)
}

pub(crate) async fn get(store: &dyn Store, key: Key) -> Option<Record> {
    let mut found = store.get(&[key]).await.expect("get must succeed");
    assert_eq!(found.len(), 1, "one result for each key");
    found.remove(0)
}

pub(crate) async fn write(store: &dyn Store, batch: &[Write]) -> Written {
    store.write(batch).await.expect("write must succeed")
}

/// Puts records without a precondition.
pub(crate) async fn put(store: &dyn Store, records: impl IntoIterator<Item = Record>) {
    use zae_limiter_core::{BATCH_MAX, Precondition};
    let writes: Vec<Write> =
        records.into_iter().map(|r| Write::Put(r, Precondition::Always)).collect();
    for batch in writes.chunks(BATCH_MAX) {
        assert_eq!(
            write(store, batch).await,
            Written::Done,
            "a put without a precondition must succeed"
        );
    }
}

pub(crate) async fn delete(store: &dyn Store, keys: impl IntoIterator<Item = Key>) {
    let keys: Vec<Key> = keys.into_iter().collect();
    store.delete(&keys).await.expect("delete must succeed");
}

/// Reads a list to its end. Calls `between` after each page but the last.
pub(crate) async fn read_all<T>(
    size: usize,
    mut fetch: impl AsyncFnMut(PageRequest) -> Result<Page<T>, StoreError>,
    mut between: impl AsyncFnMut(usize),
) -> Vec<T> {
    let mut items = Vec::new();
    let mut request = PageRequest::first(size);
    for number in 0..PAGES_MAX {
        let page = fetch(request.clone()).await.expect("a list must succeed");
        assert!(page.items.len() <= size, "a page of {size} has {} items", page.items.len());
        items.extend(page.items);
        match page.next {
            None => return items,
            after => request.after = after,
        }
        between(number).await;
    }
    panic!("a list of {} items does not end", items.len());
}

/// Reads a list with every page size. It must have exactly these items, in this order.
pub(crate) async fn check_list<T: PartialEq + Debug>(
    what: &str,
    expected: &[T],
    mut fetch: impl AsyncFnMut(PageRequest) -> Result<Page<T>, StoreError>,
) {
    for size in PAGE_SIZES {
        let listed = read_all(size, &mut fetch, async |_| {}).await;
        assert_eq!(listed, expected, "{what}, in pages of {size}");
    }
}

pub(crate) async fn check_records(store: &dyn Store, query: Query, expected: &[Record]) {
    let what = format!("{query:?}");
    check_list(&what, expected, async |page| store.list(&query, &page).await).await;
}

pub(crate) async fn check_resources(store: &dyn Store, which: ResourceList, expected: &[&str]) {
    let namespace = test_namespace();
    let expected: Vec<_> = expected.iter().map(|name| crate::given::resource(name)).collect();
    check_list(&format!("{which:?}"), &expected, async |page| {
        store.list_resources(&namespace, which, &page).await
    })
    .await;
}

pub(crate) async fn list_buckets(store: &dyn Store, query: BucketQuery) -> Vec<StoredBucket> {
    let fetch = async |page| store.list_buckets(&query, &page).await;
    read_all(PAGE_MAX, fetch, async |_| {}).await
}

/// All keys of a scope. Fails if a key is listed twice.
pub(crate) async fn keys_of(store: &dyn Store, scope: &Scope, size: usize) -> BTreeSet<Key> {
    let fetch = async |page| store.list_keys(scope, &page).await;
    let listed = read_all(size, fetch, async |_| {}).await;
    let count = listed.len();
    let keys: BTreeSet<Key> = listed.into_iter().collect();
    assert_eq!(keys.len(), count, "a key of {scope:?} is listed twice");
    keys
}
