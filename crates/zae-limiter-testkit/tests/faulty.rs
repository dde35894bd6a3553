//! Tests of the faults. A wrapper without faults behaves like the wrapped store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use zae_limiter_core::{
    Admission, Applied, BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, MemoryStore,
    NamespaceId, Plan, ResourceName, Settlement, Store, StoreErrorKind, Take, Target, Timestamp,
    amount,
};
use zae_limiter_testkit::{Call, Fault, Faulty, Gate};

const NOW: Timestamp = Timestamp::from_millis(0);

fn target() -> Arc<Target> {
    let key = BucketKey {
        namespace: NamespaceId::new("ns000000001").unwrap(),
        entity: EntityId::new("a").unwrap(),
        resource: ResourceName::new("r").unwrap(),
    };
    let limits = LimitSet::new([Limit::per_day("x", 10)]).unwrap();
    Arc::new(Target::new(key, Arc::new(limits), Lifetime::Forever))
}

fn one() -> Plan {
    let takes = [Take { cell: 0, amount: amount(1).unwrap() }].into_iter().collect();
    Plan { max_skew: None, now: NOW, legs: [Leg { target: target(), takes }].into_iter().collect() }
}

fn faulty() -> Faulty<MemoryStore> {
    Faulty::new(Arc::new(MemoryStore::new()))
}

fn poll<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// The reply of a store that replies at the first poll.
fn now<T>(future: impl Future<Output = T>) -> T {
    match poll(future) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("must not wait"),
    }
}

/// The tokens that were taken, read without faults.
fn taken(store: &Faulty<MemoryStore>) -> i64 {
    let found = now(store.inner().peek(&[target().key().clone()], NOW)).unwrap();
    found[0].as_ref().map_or(0, |bucket| bucket.cells()[0].consumed.whole_tokens())
}

#[test]
fn a_failure_before_changes_nothing() {
    let store = faulty();
    store.script(Call::Acquire, Fault::FailBefore(StoreErrorKind::Unavailable));
    let error = now(store.acquire(&one())).unwrap_err();
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Unavailable, Applied::No));
    assert_eq!(taken(&store), 0);
    assert!(now(store.acquire(&one())).is_ok(), "only one call was to fail");
    assert_eq!((taken(&store), store.calls(Call::Acquire)), (1, 2));
}

#[test]
fn a_failure_after_loses_only_the_reply() {
    let store = faulty();
    store.script(Call::Acquire, Fault::FailAfter(StoreErrorKind::Full));
    let error = now(store.acquire(&one())).unwrap_err();
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Full, Applied::Maybe));
    assert_eq!(taken(&store), 1);
}

#[test]
fn a_call_that_hangs_does_nothing() {
    let store = faulty();
    store.script(Call::Acquire, Fault::Hang);
    assert!(poll(store.acquire(&one())).is_pending());
    assert_eq!((taken(&store), store.calls(Call::Acquire)), (0, 1));
}

#[test]
fn a_held_call_goes_on_when_its_gate_opens() {
    for (fault, meanwhile) in
        [(Fault::HoldBefore as fn(Gate) -> Fault, 0), (Fault::HoldAfter as fn(Gate) -> Fault, 1)]
    {
        let (store, gate, plan) = (faulty(), Gate::new(), one());
        store.script(Call::Acquire, fault(gate.clone()));
        let mut call = store.acquire(&plan);
        let mut poll = || call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll().is_pending());
        now(gate.reached());
        assert_eq!(taken(&store), meanwhile);
        gate.open();
        assert!(matches!(poll(), Poll::Ready(Ok(Admission::Taken(_)))));
        assert_eq!(taken(&store), 1);
    }
}

#[test]
fn an_acquire_that_is_dropped_at_the_gate_is_refunded() {
    let store = faulty();
    store.script(Call::Acquire, Fault::HoldAfter(Gate::new()));
    assert!(poll(store.acquire(&one())).is_pending());
    assert_eq!(taken(&store), 0);
    assert_eq!(store.calls(Call::Settle), 0, "the caller did not settle");
}

#[test]
fn an_outage_fails_every_call_until_it_is_healed() {
    let store = faulty();
    store.break_down(Fault::FailBefore(StoreErrorKind::Unavailable));
    store.script(Call::Get, Fault::FailBefore(StoreErrorKind::Denied));
    assert_eq!(now(store.get(&[])).unwrap_err().kind(), StoreErrorKind::Denied);
    for _ in 0..3 {
        assert_eq!(now(store.get(&[])).unwrap_err().kind(), StoreErrorKind::Unavailable);
    }
    let settlement: [Settlement; 0] = [];
    assert!(now(store.settle(&settlement, NOW)).is_err());
    store.heal();
    assert!(now(store.get(&[])).is_ok());
    assert_eq!((store.calls(Call::Get), store.all_calls()), (5, 6));
}

#[test]
fn acquire_now_replies_only_while_no_fault_is_scripted() {
    let store = faulty();
    store.script(Call::Get, Fault::Hang);
    assert!(store.acquire_now(&one()).is_some());
    assert_eq!(store.calls(Call::Acquire), 1);
    store.script(Call::Acquire, Fault::Hang);
    assert!(store.acquire_now(&one()).is_none());
    assert_eq!(store.calls(Call::Acquire), 1, "it was not called");
}

#[test]
fn a_call_counts_when_it_is_polled() {
    let store = faulty();
    drop(store.get(&[]));
    assert_eq!(store.all_calls(), 0);
}

zae_limiter_testkit::conformance_tests!(wrapped, || async { Arc::new(faulty()) });
