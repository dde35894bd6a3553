//! The simulated table behaves and bills like DynamoDB.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use zae_limiter_schema::{
    Action, Change, Condition, Consistency, Index, Item, ItemKey, Query, Range, Step, Table,
    TableErrorKind, Transacted, Update, Updated, Value,
};
use zae_limiter_testkit::{Faults, Projection, SimTable, World};

/// Without virtual time every call completes at once.
fn now<T>(call: impl Future<Output = T>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("must complete at once"),
    }
}

fn key(sk: &str) -> ItemKey {
    ItemKey::new("p", sk)
}

fn n(number: i64) -> Value {
    Value::number(number)
}

fn set(name: &str, value: Value) -> Action {
    Action::Set(name.to_owned(), value)
}

fn update(
    sk: &str,
    actions: impl IntoIterator<Item = Action>,
    conditions: impl IntoIterator<Item = Condition>,
) -> Update {
    Update {
        key: key(sk),
        actions: actions.into_iter().collect(),
        conditions: conditions.into_iter().collect(),
    }
}

fn put(table: &SimTable, sk: &str, actions: impl IntoIterator<Item = Action>) -> f64 {
    match now(table.update(&update(sk, actions, []))).expect("a reply") {
        Updated::Done(_, consumed) => consumed.write,
        Updated::Unmet(..) => panic!("there was no condition"),
    }
}

#[test]
fn a_comparison_with_a_missing_attribute_or_another_type_does_not_hold() {
    let table = SimTable::default();
    put(&table, "a", [set("n", n(10)), set("s", Value::text("10"))]);
    let name = |name: &str| name.to_owned();
    for (condition, holds) in [
        (Condition::AtLeast(name("n"), n(9)), true),
        (Condition::AtLeast(name("n"), n(10)), true),
        (Condition::AtLeast(name("n"), n(11)), false),
        (Condition::AtMost(name("n"), n(9)), false),
        (Condition::Equal(name("n"), Value::N("10.0".to_owned())), true),
        (Condition::Equal(name("n"), Value::text("10")), false),
        (Condition::AtMost(name("s"), n(99)), false),
        (Condition::AtMost(name("none"), n(99)), false),
        (Condition::AtLeast(name("none"), n(-99)), false),
        (Condition::Exists(name("none")), false),
        (Condition::Absent(name("none")), true),
        (Condition::Any(vec![Condition::Absent(name("n")), Condition::Exists(name("s"))]), true),
        (Condition::Any(vec![Condition::Absent(name("n")), Condition::Absent(name("s"))]), false),
    ] {
        let answer = now(table.update(&update("a", [set("x", n(1))], [condition.clone()])));
        let done = matches!(answer.expect("a reply"), Updated::Done(..));
        assert_eq!(done, holds, "{condition:?}");
    }
}

#[test]
fn actions_see_the_old_item_and_create_what_is_missing() {
    let table = SimTable::default();
    let texts = |texts: &[&str]| Value::Ss(texts.iter().map(|text| (*text).to_owned()).collect());
    let add = |name: &str, value| Action::Add(name.to_owned(), value);
    put(&table, "a", [add("n", n(5)), add("set", texts(&["a", "b"]))]);
    put(&table, "a", [add("n", n(-7)), Action::SetIfAbsent("n2".to_owned(), n(1))]);
    put(&table, "a", [Action::SetIfAbsent("n2".to_owned(), n(2)), add("set", texts(&["c"]))]);
    put(&table, "a", [Action::Delete("set".to_owned(), texts(&["a", "z"]))]);
    let item = table.item(&key("a")).expect("the item");
    assert_eq!((&item["n"], &item["n2"], &item["set"]), (&n(-2), &n(1), &texts(&["b", "c"])));
    put(
        &table,
        "a",
        [Action::Delete("set".to_owned(), texts(&["b", "c"])), Action::Remove("n2".to_owned())],
    );
    let item = table.item(&key("a")).expect("the item");
    let names: BTreeSet<&str> = item.keys().map(String::as_str).collect();
    assert_eq!(names, BTreeSet::from(["PK", "SK", "n"]), "an empty set is no attribute");
}

#[test]
fn what_dynamodb_rejects_is_rejected() {
    let table = SimTable::default();
    put(&table, "a", [set("s", Value::text("x"))]);
    let big = "x".repeat(400 * 1_024);
    let many = (0..200).map(|at| Condition::Exists(format!("a{at}")));
    for wrong in [
        update("a", [], []),
        update("a", [set("x", n(1)), Action::Remove("x".to_owned())], []),
        update("a", [set("PK", n(1))], []),
        update("a", [set("GSI1PK", n(1))], []),
        update("a", [set("GSI1PK", Value::text(""))], []),
        update("a", [set("x", Value::N("1e400".to_owned()))], []),
        update("a", [set("x", Value::Ss(BTreeSet::new()))], []),
        update("a", [Action::Add("s".to_owned(), n(1))], []),
        update("a", [Action::Add("x".to_owned(), Value::text("y"))], []),
        update("a", [set("x", Value::text(big))], []),
        update("a", [set("x", n(1))], many),
        update("", [set("x", n(1))], []),
    ] {
        let error = now(table.update(&wrong)).expect_err("must be rejected");
        assert_eq!(error.kind, TableErrorKind::Rejected, "{error}");
    }
}

#[test]
fn writes_are_billed_by_the_larger_item_and_by_index() {
    let table = SimTable::default();
    let kib = |count: usize| Value::text("x".repeat(count * 1_024));
    assert_eq!(put(&table, "a", [set("x", n(1))]), 1.0);
    assert_eq!(put(&table, "a", [set("x", kib(2))]), 3.0, "what it becomes");
    assert_eq!(put(&table, "a", [set("x", n(1))]), 3.0, "what it was");
    put(&table, "a", [set("x", kib(2))]);
    let unmet = |sk| update(sk, [set("x", n(1))], [Condition::Exists("none".to_owned())]);
    let bill = |sk| match now(table.update(&unmet(sk))).expect("a reply") {
        Updated::Unmet(_, consumed) => consumed.write,
        Updated::Done(..) => panic!("must not happen"),
    };
    assert_eq!(bill("a"), 3.0, "a failed condition costs what the item costs");
    assert_eq!(bill("none"), 1.0, "and one where there is none");

    let index = |pk: &str| [set("GSI3PK", Value::text(pk)), set("GSI3SK", Value::text("s"))];
    assert_eq!(put(&table, "i", index("one")), 2.0, "an insert");
    assert_eq!(put(&table, "i", [set("x", n(1))]), 1.0, "keys only: not written");
    assert_eq!(put(&table, "i", [set("GSI3PK", Value::text("two"))]), 3.0, "a delete, an insert");
    assert_eq!(put(&table, "i", [Action::Remove("GSI3PK".to_owned())]), 2.0, "a delete");
    let parent = [set("GSI1PK", Value::text("p")), set("GSI1SK", Value::text("s"))];
    assert_eq!(put(&table, "all", parent), 2.0);
    assert_eq!(put(&table, "all", [set("x", n(1))]), 2.0, "all attributes: written");
    let totals = table.totals();
    assert_eq!(totals.index_writes, [2.0, 0.0, 4.0, 0.0]);
}

#[test]
fn a_transaction_happens_as_a_whole_and_costs_twice() {
    let table = SimTable::default();
    put(&table, "a", [set("n", n(1))]);
    let at_least = |number| Condition::AtLeast("n".to_owned(), n(number));
    let changes = |least| {
        [
            Change::Update(update("a", [set("n", n(2))], [at_least(least)])),
            Change::Update(update("b", [set("n", n(2))], [])),
            Change::Check(key("c"), vec![Condition::Absent("PK".to_owned())]),
        ]
    };
    match now(table.transact(&changes(5))).expect("a reply") {
        Transacted::Unmet(reasons, consumed) => {
            assert!(matches!(&reasons[..], [Some(Some(_)), None, None]), "{reasons:?}");
            assert_eq!(consumed.write, 6.0);
        }
        Transacted::Done(_) => panic!("must not happen"),
    }
    assert_eq!((table.items().len(), &table.item(&key("a")).expect("it")["n"]), (1, &n(1)));
    match now(table.transact(&changes(1))).expect("a reply") {
        Transacted::Done(consumed) => assert_eq!(consumed.write, 6.0),
        Transacted::Unmet(reasons, _) => panic!("{reasons:?}"),
    }
    assert_eq!(table.items().len(), 2);
    let deletions = [Change::Delete(key("a"), vec![]), Change::Delete(key("b"), vec![])];
    now(table.transact(&deletions)).expect("a reply");
    assert!(table.items().is_empty());
    let twice = [Change::Delete(key("a"), vec![]), Change::Check(key("a"), vec![])];
    assert_eq!(now(table.transact(&twice)).expect_err("twice").kind, TableErrorKind::Rejected);
}

#[test]
fn reads_are_billed_by_four_kib_and_half_when_eventual() {
    let table = SimTable::default();
    put(&table, "a", [set("x", Value::text("x".repeat(5_000)))]);
    for (consistency, units) in [(Consistency::Strong, 3.0), (Consistency::Eventual, 1.5)] {
        let read = now(table.read(&[key("a"), key("none")], consistency)).expect("a reply");
        assert_eq!((read.items.len(), read.consumed.read), (1, units));
    }
}

fn query(index: Option<Index>, partition: &str, limit: usize) -> Query {
    Query {
        index,
        partition: partition.to_owned(),
        range: Range::All,
        step: Step::Forward,
        limit,
        after: None,
        consistency: Consistency::Eventual,
    }
}

/// The sort keys of all pages.
fn pages(table: &SimTable, mut query: Query) -> Vec<Vec<String>> {
    let mut pages = Vec::new();
    loop {
        let answer = now(table.query(&query)).expect("a reply");
        let sk = |item: &Item| item["SK"].as_str().expect("a text").to_owned();
        pages.push(answer.items.iter().map(sk).collect());
        match answer.next {
            None => return pages,
            next => query.after = next,
        }
    }
}

#[test]
fn queries_go_through_a_partition_page_by_page() {
    let table = SimTable::default();
    for sk in ["a1", "a2", "b1", "b2", "c1"] {
        let index = [set("GSI2PK", Value::text("r")), set("GSI2SK", Value::text(format!("x{sk}")))];
        put(&table, sk, index.into_iter().chain([set("n", n(1))]));
    }
    for (index, partition) in [(None, "p"), (Some(Index::Resource), "r")] {
        let all = query(index, partition, 2);
        assert_eq!(pages(&table, all.clone()), [vec!["a1", "a2"], vec!["b1", "b2"], vec!["c1"]]);
        let back = Query { step: Step::Backward, limit: 3, ..all };
        assert_eq!(pages(&table, back), [vec!["c1", "b2", "b1"], vec!["a2", "a1"]]);
    }
    let ranges = [
        (Range::StartsWith("b".to_owned()), vec!["b1", "b2"]),
        (Range::Between("a2".to_owned(), "b1".to_owned()), vec!["a2", "b1"]),
    ];
    for (range, found) in ranges {
        assert_eq!(pages(&table, Query { range, ..query(None, "p", 100) }), [found]);
    }
    // A full page names its end, even where nothing follows.
    assert_eq!(pages(&table, query(None, "p", 5)).len(), 2);
    let found = now(table.query(&query(Some(Index::Resource), "r", 1))).expect("a reply");
    assert!(!found.items[0].contains_key("n"), "keys only");
    let strong = Query { consistency: Consistency::Strong, ..query(Some(Index::Resource), "r", 1) };
    assert!(now(table.query(&strong)).is_err());
    assert!(now(table.query(&query(None, "p", 0))).is_err());
}

#[test]
fn a_page_ends_at_a_megabyte() {
    let table = SimTable::default();
    for sk in ["a", "b", "c", "d"] {
        put(&table, sk, [set("x", Value::text("x".repeat(300_000)))]);
    }
    assert_eq!(pages(&table, query(None, "p", 100)), [vec!["a", "b", "c"], vec!["d"]]);
    let page = now(table.query(&query(None, "p", 100))).expect("a reply");
    assert_eq!(page.consumed.read, 110.0, "900,000 bytes, eventual");
}

#[test]
fn deleting_is_billed_and_indifferent() {
    let table = SimTable::default();
    table.set_projection(Index::Resource, Projection::All);
    put(&table, "a", [set("GSI2PK", Value::text("r")), set("GSI2SK", Value::text("s"))]);
    let consumed = now(table.delete(&[key("a"), key("none")])).expect("a reply");
    assert_eq!((consumed.write, table.items().len()), (3.0, 0));
}

#[test]
fn an_index_lags_and_a_lost_answer_has_been_applied() {
    World::play(7, 0, async |world| {
        let table = world.table.for_client(1);
        table.set_faults(Faults { lag_us: 1_000_000, ..Faults::delay(1_000) });
        let index = [set("GSI4PK", Value::text("ns")), set("GSI4SK", Value::text("s"))];
        table.update(&update("a", index, [])).await.expect("a reply");
        let listed = async || {
            let answer = table.query(&query(Some(Index::Namespace), "ns", 10)).await;
            answer.expect("a reply").items.len()
        };
        assert_eq!(listed().await, 0, "not yet");
        world.time.sleep(std::time::Duration::from_secs(1)).await;
        assert_eq!(listed().await, 1);

        table.set_faults(Faults { lost_answer: 1.0, ..Faults::delay(1_000) });
        let error = table.update(&update("b", [set("n", n(1))], [])).await.expect_err("lost");
        assert_eq!(error.applied, zae_limiter_core::Applied::Maybe);
        assert!(table.item(&key("b")).is_some());
        table.set_faults(Faults { lost_request: 1.0, ..Faults::delay(1_000) });
        let error = table.update(&update("c", [set("n", n(1))], [])).await.expect_err("lost");
        assert_eq!(error.applied, zae_limiter_core::Applied::Maybe);
        assert!(table.item(&key("c")).is_none());
    });
}

#[test]
fn a_partition_takes_so_much_in_a_second() {
    World::play(7, 0, async |world| {
        let table = world.table.for_client(1);
        table.set_faults(Faults { partition_units: Some(3.0), ..Faults::none() });
        let write = async || table.update(&update("a", [set("n", n(1))], [])).await;
        for _ in 0..3 {
            write().await.expect("within the bound");
        }
        let error = write().await.expect_err("beyond it");
        assert_eq!(error.kind, TableErrorKind::PartitionThrottled);
        assert_eq!(error.applied, zae_limiter_core::Applied::No);
        world.time.sleep(std::time::Duration::from_secs(1)).await;
        write().await.expect("the next second");
    });
}
