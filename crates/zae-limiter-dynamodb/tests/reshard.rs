//! Buckets that are written too often for one item: split, never over-admitted, merged.

mod one_bucket;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use zae_limiter_core::{
    Admission, Lifetime, Limit, LimitSet, LimitStatus, Millitokens, Placement, Settlement, Store,
    Take, Target, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{Action, BucketItemKey, Change, Item, Table, Transacted, Update, Value};
use zae_limiter_testkit::{Faults, SimTable, World};

use one_bucket::{at, key, plan, target};

fn store(table: &SimTable) -> DynamoStore {
    DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default().seed(1))
}

/// The shard that the tokens were taken from, or the refusal.
async fn take(
    store: &DynamoStore,
    target: &Arc<Target>,
    tokens: i64,
    now: Timestamp,
) -> Result<u32, Vec<LimitStatus>> {
    match store.acquire(&plan(target, tokens * 1_000, now)).await.expect("an answer") {
        Admission::Taken(taken) => Ok(taken[0].placement.get()),
        Admission::Refused(statuses) => Err(statuses),
    }
}

fn item_of(table: &SimTable, shard: u32) -> Option<Item> {
    table.item(&BucketItemKey { bucket: key(), shard }.item_key())
}

fn number(item: &Item, name: &str) -> i64 {
    item.get(name).and_then(Value::as_i64).unwrap_or_else(|| panic!("no {name} in {item:?}"))
}

/// The count that the first shard knows.
fn count(table: &SimTable) -> i64 {
    item_of(table, 0).map_or(1, |first| number(&first, "shard_count"))
}

/// Splits until there are `shards` shards.
async fn split_until(store: &DynamoStore, table: &SimTable, shards: i64, now: Timestamp) {
    while count(table) < shards {
        store.split(&key(), now).await.expect("an answer");
        // The other shards are split in the background.
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
    }
    let there = (0..64).filter_map(|shard| item_of(table, shard)).count();
    assert_eq!(there, usize::try_from(shards).expect("few"), "shards");
}

#[tokio::test]
async fn ten_tokens_stay_ten_through_splits_to_32_and_merges() {
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_minute("rpm", 100)));
    take(&store, &target, 90, at(0)).await.expect("admitted");
    for shards in [2, 4, 8, 16, 32] {
        split_until(&store, &table, shards, at(0)).await;
        let whole = store.peek(&[key()], at(0)).await.expect("an answer");
        let whole = whole[0].as_ref().expect("a bucket");
        let (cell, rate) = whole.cell("rpm").expect("the limit");
        assert_eq!((cell.tokens.get(), rate.capacity().get()), (10_000, 100_000));
    }
    let mut admitted = 0;
    while take(&store, &target, 1, at(0)).await.is_ok() {
        admitted += 1;
    }
    assert_eq!(admitted, 10);
    while count(&table) > 1 {
        store.merge(&key(), at(0)).await.expect("an answer");
    }
    assert!(take(&store, &target, 1, at(0)).await.is_err());
    take(&store, &target, 1, at(600)).await.expect("one is earned in 600 ms");
}

#[tokio::test]
async fn a_request_larger_than_a_share_is_admitted_when_all_have_enough() {
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_minute("tpm", 1_000)));
    take(&store, &target, 100, at(0)).await.expect("admitted");
    split_until(&store, &table, 16, at(0)).await;
    let statuses = take(&store, &target, 901, at(0)).await.expect_err("more than there is");
    assert_eq!(
        (statuses[0].available.get(), statuses[0].rate.capacity().get()),
        (900_000, 1_000_000)
    );
    let shard = take(&store, &target, 900, at(0)).await.expect("900 in all");
    assert_eq!(store.reshard_counts().gathered, 1);
    // All of it back: more than the shard it is said to come from has room for.
    let settlement = Settlement {
        target: Arc::clone(&target),
        placement: Placement::new(shard),
        differences: [Take { cell: 0, amount: Millitokens::new(-900_000) }].into_iter().collect(),
    };
    store.settle(&[settlement], at(0)).await.expect("settled");
    take(&store, &target, 900, at(0)).await.expect("all of it is back");
    let statuses = take(&store, &target, 900, at(0)).await.expect_err("nothing is left");
    // 900 at 1,000 a minute; to the millisecond, however many shards there are.
    let wait = statuses[0].retry_after;
    let late = at(i64::try_from(wait.as_millis()).expect("a minute"));
    assert!((54_000..54_020).contains(&wait.as_millis()), "{wait:?}");
    take(&store, &target, 900, late).await.expect("after the wait");
}

#[tokio::test]
async fn a_lease_from_a_retired_shard_is_settled_on_the_shard_that_has_its_share() {
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_minute("rpm", 100)));
    take(&store, &target, 20, at(0)).await.expect("admitted");
    split_until(&store, &table, 8, at(0)).await;
    // Settle it on the last shard.
    let settle = |amount: i64| Settlement {
        target: Arc::clone(&target),
        placement: Placement::new(7),
        differences: [Take { cell: 0, amount: Millitokens::new(amount) }].into_iter().collect(),
    };
    for _ in 0..3 {
        store.merge(&key(), at(0)).await.expect("an answer");
    }
    assert_eq!(count(&table), 1);
    // By a process that still believes in eight shards, and by one that knows of none.
    store.settle(&[settle(-5_000)], at(0)).await.expect("settled");
    let other = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
    other.settle(&[settle(3_000)], at(0)).await.expect("settled");
    let first = item_of(&table, 0).expect("the first shard");
    assert_eq!((number(&first, "b_rpm_tk"), number(&first, "b_rpm_tc")), (82_000, 18_000));
}

/// A bucket of two shards. Only the second one has the limit `odd`, and has charged 5 of it.
async fn odd_on_the_second_shard(table: &SimTable) -> (DynamoStore, Arc<Target>) {
    let store = store(table);
    take(&store, &target(Limit::per_minute("rpm", 100)), 1, at(0)).await.expect("admitted");
    split_until(&store, table, 2, at(0)).await;
    let both = [Limit::per_minute("odd", 60), Limit::per_minute("rpm", 100)];
    let both = LimitSet::new(both).expect("valid limits");
    let both = Arc::new(Target::new(key(), Arc::new(both), Lifetime::Forever));
    store.settle(&[differences(&both, 1, &[("odd", 5)])], at(0)).await.expect("settled");
    assert!(item_of(table, 0).is_some_and(|item| !item.contains_key("b_odd_tc")));
    (store, both)
}

fn differences(target: &Arc<Target>, shard: u32, tokens: &[(&str, i64)]) -> Settlement {
    let take = |(limit, tokens): &(&str, i64)| {
        let cell = target.limits().position(limit).expect("the limit");
        Take { cell, amount: Millitokens::new(tokens * 1_000) }
    };
    let (target, placement) = (Arc::clone(target), Placement::new(shard));
    Settlement { target, placement, differences: tokens.iter().map(take).collect() }
}

/// A refund to a full bucket raises no balance, but lowers the net consumption, from which usage is booked.
#[tokio::test]
async fn a_refund_counts_on_a_shard_that_has_its_limit() {
    let table = SimTable::default();
    let (store, both) = odd_on_the_second_shard(&table).await;
    let of_second = |table: &SimTable| {
        let item = item_of(table, 1).expect("the shard");
        (number(&item, "b_odd_tk"), number(&item, "b_odd_tc"))
    };
    assert_eq!(of_second(&table), (25_000, 5_000));
    // A minute later it is full again.
    store.settle(&[differences(&both, 0, &[("odd", -2)])], at(60_000)).await.expect("settled");
    assert_eq!(of_second(&table), (30_000, 3_000));
    // A limit that no shard has is ignored, the other one counts.
    let third = [Limit::per_minute("new", 7), Limit::per_minute("odd", 60)];
    let third = LimitSet::new(third).expect("valid limits");
    let third = Arc::new(Target::new(key(), Arc::new(third), Lifetime::Forever));
    let refund = differences(&third, 0, &[("new", -1), ("odd", -1)]);
    store.settle(&[refund], at(60_000)).await.expect("settled");
    assert_eq!(of_second(&table), (30_000, 2_000));
}

#[tokio::test]
async fn a_refund_that_repays_debts_counts_on_a_shard_that_has_its_limit() {
    let table = SimTable::default();
    let (store, both) = odd_on_the_second_shard(&table).await;
    store.settle(&[differences(&both, 0, &[("rpm", 400)])], at(0)).await.expect("settled");
    let refund = differences(&both, 0, &[("odd", -2), ("rpm", -20)]);
    store.settle(&[refund], at(60_000)).await.expect("settled");
    let items = [0, 1].map(|shard| item_of(&table, shard).expect("the shard"));
    // 99 and 100 a minute, less 400, and 20 back.
    let owed: i64 = items.iter().map(|item| number(item, "b_rpm_tk")).sum();
    assert_eq!(owed, -181_000);
    assert_eq!((number(&items[1], "b_odd_tk"), number(&items[1], "b_odd_tc")), (30_000, 3_000));
}

/// A shard is hot when fewer than 150 of its 1,000 writes are left. Split, it has 800 again and the
/// new one all of them: the same rush does not split them at once, but when it goes on.
#[tokio::test]
async fn a_rush_splits_a_bucket_once_and_again_only_if_it_continues() {
    let table = SimTable::default();
    let options = DynamoOptions::default().seed(1).without_group_commit();
    let store = DynamoStore::new(Arc::new(table.clone()), options);
    let target = target(Limit::per_second("rps", 100_000));
    let mut splits = Vec::new();
    for call in 1..=2_500 {
        let before = count(&table);
        take(&store, &target, 1, at(0)).await.expect("admitted");
        // Splitting happens in the background.
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
        if count(&table) != before {
            splits.push((call, count(&table)));
        }
    }
    assert_eq!(splits.len(), 2, "{splits:?}");
    assert_eq!(splits[0], (851, 2));
    // Each of the two gets about every second call.
    assert_eq!(splits[1].1, 4);
    assert!((1_200..1_500).contains(&(splits[1].0 - 851)), "{splits:?}");
}

#[tokio::test]
async fn slow_writes_never_split_a_bucket() {
    // An hour; `ten_requests_a_second_for_a_day_never_split_a_bucket` is longer.
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_second("rps", 1_000)));
    for call in 0..36_000 {
        take(&store, &target, 1, at(call * 100)).await.expect("admitted");
    }
    assert_eq!(count(&table), 1);
    assert_eq!(store.reshard_counts().splits, 0);
}

#[tokio::test]
#[ignore = "a minute in a debug build: run with --release -- --ignored"]
async fn ten_requests_a_second_for_a_day_never_split_a_bucket() {
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_second("rps", 1_000)));
    for call in 0..864_000 {
        take(&store, &target, 1, at(call * 100)).await.expect("admitted");
    }
    assert_eq!(count(&table), 1);
}

#[tokio::test]
async fn a_bucket_left_in_many_shards_is_merged_when_it_is_calm() {
    let table = SimTable::default();
    let target = target(Limit::per_minute("rpm", 100));
    let options = DynamoOptions::default().merge_after(Duration::from_secs(600));
    let store = DynamoStore::new(Arc::new(table.clone()), options);
    take(&store, &target, 40, at(0)).await.expect("admitted");
    split_until(&store, &table, 8, at(0)).await;
    // One call every ten seconds, for an hour.
    let mut merges = Vec::new();
    for call in 1..=360 {
        let before = count(&table);
        let now = at(call * 10_000);
        take(&store, &target, 1, now).await.expect("admitted");
        for _ in 0..500 {
            tokio::task::yield_now().await;
        }
        if count(&table) != before {
            merges.push((call * 10 / 60, count(&table)));
        }
    }
    assert_eq!(count(&table), 1, "{merges:?}");
    assert_eq!(store.reshard_counts().merges, 3);
    assert!(merges[0].0 >= 10, "{merges:?}");
    // What is left of the shards goes with the bucket.
    store.delete(&[zae_limiter_core::Key::Bucket(key())]).await.expect("deleted");
    assert_eq!(table.items().len(), 0);
}

/// What the original does: raises the count on the first shard, and makes new shards full.
async fn split_as_the_python_client_does(table: &SimTable) {
    let first = BucketItemKey { bucket: key(), shard: 0 };
    let raised = Update {
        key: first.item_key(),
        actions: vec![Action::Set("shard_count".to_owned(), Value::number(2))],
        conditions: Vec::new(),
    };
    let mut second: Item = item_of(table, 0).expect("the first shard");
    second.insert("b_rpm_tk".to_owned(), Value::number(100_000));
    second.insert("shard_count".to_owned(), Value::number(2));
    for name in ["PK", "SK"] {
        second.remove(name);
    }
    let born_full = Update {
        key: BucketItemKey { bucket: key(), shard: 1 }.item_key(),
        actions: second.into_iter().map(|(name, value)| Action::Set(name, value)).collect(),
        conditions: Vec::new(),
    };
    let changes = [Change::Update(raised), Change::Update(born_full)];
    let answer = table.transact(&changes).await.expect("an answer");
    assert!(matches!(answer, Transacted::Done(_)));
}

/// Our part of the promise: of what another client has made out of nothing, no more than a share
/// counts, and nothing is added to it.
#[tokio::test]
async fn a_shard_that_another_client_made_full_holds_no_more_than_its_share() {
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_minute("rpm", 100)));
    take(&store, &target, 90, at(0)).await.expect("admitted");
    split_as_the_python_client_does(&table).await;
    let fresh = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
    let mut admitted = 0;
    while take(&fresh, &target, 1, at(0)).await.is_ok() {
        admitted += 1;
    }
    // 10 that were left, and the new shard's share of 50: not the 100 that it was made with.
    assert_eq!(admitted, 60);
}

/// Raises the count on one shard and nothing else, as the original does.
async fn raise(table: &SimTable, shard: u32, count: i64) {
    let raised = Update {
        key: BucketItemKey { bucket: key(), shard }.item_key(),
        actions: vec![Action::Set("shard_count".to_owned(), Value::number(count))],
        conditions: Vec::new(),
    };
    table.update(&raised).await.expect("an answer");
}

/// A shard that was merged with another lies there for a day, and does not stand in the way when
/// another client counts it as a shard again.
#[tokio::test]
async fn a_shard_that_another_client_counts_again_is_restored_with_nothing() {
    let table = SimTable::default();
    let (store, target) = (store(&table), target(Limit::per_minute("rpm", 100)));
    take(&store, &target, 20, at(0)).await.expect("admitted");
    split_until(&store, &table, 4, at(0)).await;
    for _ in 0..2 {
        store.merge(&key(), at(0)).await.expect("an answer");
    }
    // The first shard's share is a half now, and no shard has the other half.
    raise(&table, 0, 2).await;
    let fresh = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
    let statuses = take(&fresh, &target, 60, at(0)).await.expect_err("more than a half");
    assert_eq!(statuses[0].available.get(), 50_000);
    let second = item_of(&table, 1).expect("the second shard");
    assert_eq!((number(&second, "shard_count"), number(&second, "b_rpm_tk")), (2, 0));
    // The count of a shard other than the first may be raised later than all that.
    raise(&table, 1, 4).await;
    let statuses = take(&fresh, &target, 60, at(1_000)).await.expect_err("more than there is");
    assert!((50_000..52_000).contains(&statuses[0].available.get()), "{statuses:?}");
    assert_eq!(item_of(&table, 3).map(|last| number(&last, "shard_count")), Some(4));
    take(&fresh, &target, 60, at(60_000)).await.expect("all shards have refilled");
}

/// Whether what was admitted at these moments, in microseconds and in order, is in no interval more
/// than the ceiling and what the interval earns. The clocks of this world are right to a millisecond.
fn assert_never_too_many(admitted_us: &[u64], capacity: u64, per_second: u64) {
    let mut lowest = i128::MAX;
    for (before, at_us) in admitted_us.iter().enumerate() {
        let earned = i128::from(per_second) * i128::from(*at_us);
        let before = i128::try_from(before).expect("few") * 1_000_000;
        lowest = lowest.min(before - earned);
        let risen = before + 1_000_000 - earned - lowest;
        // A request carries the moment at which it was made.
        let most = i128::from(capacity) * 1_000_000 + i128::from(per_second) * 1_000;
        assert!(risen <= most, "too many at {at_us} us: {risen} of {most}");
    }
}

/// Answers are up to 8 ms behind the taking: at 10,000 a second so many.
const LATE: u64 = 80;

/// So many acquires by processes that come at random to a table whose partitions take 1,000 write
/// units a second, and what came of them.
#[derive(Default)]
struct Rush {
    admitted_by_second: BTreeMap<u64, u64>,
    admitted_us: Vec<u64>,
    asked: u32,
    refused: u64,
    failed: u64,
    shards: i64,
    units: f64,
}

fn rush(
    seed: u64,
    processes: u32,
    per_second: u64,
    seconds: u64,
    options: DynamoOptions,
    limit: Limit,
) -> Rush {
    World::play(seed, 1, async move |world| {
        let faults = Faults { partition_units: Some(1_000.0), ..Faults::none() };
        world.table.set_faults(Faults { delay_us: 500..=8_000, ..faults });
        let rush = Rush { shards: 1, ..Rush::default() };
        let rush = Arc::new(Mutex::new(rush));
        let target = target(limit);
        let mut tasks = Vec::new();
        for process in 0..processes {
            let table = Arc::new(world.table.for_client(process + 1));
            let store = Arc::new(DynamoStore::new(table, options.clone().seed(process.into())));
            for call in 0..per_second * seconds {
                let (world, rush) = (Arc::clone(&world), Arc::clone(&rush));
                let (store, target) = (Arc::clone(&store), Arc::clone(&target));
                // Evenly, each process a little after the other.
                let begin_us = call * 1_000_000 / per_second + u64::from(process) * 97;
                tasks.push(tokio::spawn(async move {
                    world.time.sleep(Duration::from_micros(begin_us)).await;
                    let plan = plan(&target, 1_000, world.time.now());
                    let answer = store.acquire(&plan).await;
                    let second = world.time.now_us() / 1_000_000;
                    let mut rush = rush.lock().expect("nobody panics");
                    rush.asked += 1;
                    match answer {
                        Ok(Admission::Taken(_)) => {
                            *rush.admitted_by_second.entry(second).or_default() += 1;
                            rush.admitted_us.push(world.time.now_us());
                        }
                        Ok(Admission::Refused(_)) => rush.refused += 1,
                        Err(_) => rush.failed += 1,
                    }
                }));
            }
        }
        for task in tasks {
            task.await.expect("nobody panics");
        }
        let mut rush = Arc::into_inner(rush).expect("all are done").into_inner().expect("sound");
        rush.shards = count(&world.table);
        rush.units = world.table.totals().table_writes;
        rush
    })
}

/// Each call by itself: while a bucket is full every write moves its refill time, one after the
/// other, so that a shard admits one call in a round trip. It takes as many shards as there may be, and
/// some seconds to get there.
#[test]
#[ignore = "a minute in a debug build: run with --release -- --ignored"]
fn a_rush_without_group_commit_reaches_the_rate_within_five_seconds_and_never_exceeds_it() {
    let options = DynamoOptions::default().without_group_commit();
    let rush = rush(7, 20, 500, 7, options, Limit::per_second("rps", 10_000));
    println!("by second {:?}, {} shards", rush.admitted_by_second, rush.shards);
    println!("asked {}, refused {}, failed {}", rush.asked, rush.refused, rush.failed);
    assert_never_too_many(&rush.admitted_us, 10_000 + LATE, 10_000);
    for second in 4..7 {
        assert!(rush.admitted_by_second[&second] >= 9_000, "second {second}");
    }
}

#[test]
#[ignore = "minutes in a debug build: run with --release -- --ignored"]
fn a_rush_with_group_commit_needs_few_shards() {
    for seed in [7, 8, 9] {
        let limit = Limit::per_second("rps", 10_000);
        let rush = rush(seed, 20, 500, 5, DynamoOptions::default(), limit);
        println!("by second {:?}, {} shards", rush.admitted_by_second, rush.shards);
        println!("asked {}, {} write units", rush.asked, rush.units);
        assert!(rush.shards <= 4, "{} shards", rush.shards);
        assert!(rush.units < f64::from(rush.asked) / 5.0, "{} write units", rush.units);
        assert_eq!((rush.refused, rush.failed), (0, 0));
        assert_never_too_many(&rush.admitted_us, 10_000 + LATE, 10_000);
        for second in 2..5 {
            let admitted = rush.admitted_by_second[&second];
            assert!(admitted >= 9_000, "{admitted} in second {second}");
        }
    }
}

/// A table that answers at once is written as fast as it answers, unless those who wait go together.
#[test]
fn callers_of_one_process_share_writes_before_a_bucket_is_split() {
    let (writes, shards) = World::play(5, 1, async |world| {
        world.table.set_faults(Faults { delay_us: 150..=200, ..Faults::none() });
        let table = Arc::new(world.table.for_client(1));
        let store = Arc::new(DynamoStore::new(table, DynamoOptions::default().seed(1)));
        let target = target(Limit::per_second("rps", 1_000_000));
        let mut callers = Vec::new();
        for call in 0..7_500 {
            let (world, store, target) = (world.clone(), store.clone(), target.clone());
            callers.push(tokio::spawn(async move {
                world.time.sleep(Duration::from_micros(call * 200)).await;
                let plan = plan(&target, 1_000, world.time.now());
                let answer = store.acquire(&plan).await;
                assert!(matches!(answer, Ok(Admission::Taken(_))), "{answer:?}");
            }));
        }
        for caller in callers {
            caller.await.expect("nobody panics");
        }
        (world.table.totals().calls, count(&world.table))
    });
    println!("{writes} writes, {shards} shards");
    assert_eq!(shards, 1);
    // What 1.5 seconds bear, and what a quiet bucket can take at once.
    assert!(writes < 2_500, "{writes} writes");
}

/// At 90 % of the limit there is always enough; every refusal is wrong.
#[test]
fn few_requests_are_refused_at_nine_tenths_of_the_limit() {
    let (asked, refused) = World::play(3, 1, async move |world| {
        world.table.set_faults(Faults { delay_us: 1_000..=4_000, ..Faults::none() });
        let target = target(Limit::per_second("rps", 400).burst(800));
        let processes: Vec<DynamoStore> = (1..=8)
            .map(|process| {
                let table = Arc::new(world.table.for_client(process));
                DynamoStore::new(table, DynamoOptions::default().seed(process.into()))
            })
            .collect();
        take(&processes[0], &target, 1, world.time.now()).await.expect("admitted");
        while count(&world.table) < 8 {
            processes[0].split(&key(), world.time.now()).await.expect("an answer");
            world.time.sleep(Duration::from_millis(200)).await;
        }
        let refused = Arc::new(Mutex::new(0_u32));
        let mut tasks = Vec::new();
        let calls = 360 * 20;
        for call in 0..calls {
            let (world, refused) = (Arc::clone(&world), Arc::clone(&refused));
            let (store, target) = (processes[call % 8].clone(), Arc::clone(&target));
            tasks.push(tokio::spawn(async move {
                let begin =
                    Duration::from_micros(u64::try_from(call).expect("few") * 1_000_000 / 360);
                world.time.sleep(begin).await;
                let plan = plan(&target, 1_000, world.time.now());
                if !matches!(store.acquire(&plan).await, Ok(Admission::Taken(_))) {
                    *refused.lock().expect("nobody panics") += 1;
                }
            }));
        }
        for task in tasks {
            task.await.expect("nobody panics");
        }
        assert_eq!(count(&world.table), 8);
        let refused = *refused.lock().expect("nobody panics");
        (calls, refused)
    });
    println!("{refused} of {asked} were refused");
    assert!(refused * 1_000 < u32::try_from(asked).expect("few"));
}

/// A charge of `tokens` on a lease from a shard.
async fn charge(
    store: &DynamoStore,
    target: &Arc<Target>,
    shard: u32,
    tokens: i64,
    now: Timestamp,
) {
    let differences = [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }];
    let differences = differences.into_iter().collect();
    let settlement =
        Settlement { target: Arc::clone(target), placement: Placement::new(shard), differences };
    store.settle(&[settlement], now).await.expect("an answer");
}

#[tokio::test]
async fn a_bucket_in_debt_admits_nothing_whatever_its_shards_hold() {
    let (table, target) = (SimTable::default(), target(Limit::per_minute("rpm", 600)));
    let first = store(&table);
    let shard = take(&first, &target, 0, at(0)).await.expect("nothing is asked");
    take(&first, &target, 1, at(0)).await.expect("a full bucket");
    split_until(&first, &table, 4, at(0)).await;
    // 599 are there, 150 of them in one shard. All are used, and 60 more: six seconds' worth.
    charge(&first, &target, shard, 659, at(0)).await;
    let held: Vec<i64> =
        (0..4).filter_map(|shard| Some(number(&item_of(&table, shard)?, "b_rpm_tk"))).collect();
    assert_eq!(held, [-15_000; 4], "every shard bears its share of the debt");
    for process in 2..10 {
        let options = DynamoOptions::default().seed(process);
        let other = DynamoStore::new(Arc::new(table.clone()), options);
        assert!(take(&other, &target, 1, at(6_000)).await.is_err(), "the debt is just repaid");
        let admitted = take(&other, &target, 1, at(6_100)).await;
        assert_eq!(admitted.is_ok(), process == 2, "one token was earned since");
    }
}

/// A debt that a shard repays within a second costs one write, not one for each shard.
#[tokio::test]
async fn a_small_debt_stays_with_its_shard() {
    let (table, target) = (SimTable::default(), target(Limit::per_minute("rpm", 600)));
    let store = store(&table);
    take(&store, &target, 600, at(0)).await.expect("a full bucket");
    split_until(&store, &table, 4, at(0)).await;
    charge(&store, &target, 1, 2, at(0)).await;
    let held = (0..4).filter_map(|shard| Some(number(&item_of(&table, shard)?, "b_rpm_tk")));
    assert_eq!(held.collect::<Vec<_>>(), [0, -2_000, 0, 0]);
}

#[tokio::test]
async fn a_bucket_that_expires_does_so_again_after_a_split_and_a_merge() {
    let table = SimTable::default();
    let first = store(&table);
    let target = target(Limit::per_minute("rpm", 600));
    // What a late charge leaves lives for as long as it takes to fill: half a minute.
    charge(&first, &target, 0, 300, at(0)).await;
    let ttl = || item_of(&table, 0).and_then(|item| item.get("ttl").and_then(Value::as_i64));
    let expires = ttl().expect("what a late charge leaves expires");
    split_until(&first, &table, 4, at(0)).await;
    assert_eq!(ttl(), None, "shards do not expire one by one");
    for _ in 0..2 {
        first.merge(&key(), at(0)).await.expect("an answer");
    }
    assert_eq!(count(&table), 1);
    assert_eq!(ttl(), Some(expires));
}
