//! A future can be dropped at any moment.

use std::sync::Arc;
use std::task::Poll;

use zae_limiter_core::{
    Admission, BucketQuery, Key, Leg, Millitokens, Placement, Precondition, Store, Target, Write,
};

use crate::calls::{balance, get, list_buckets, peek, put, settle, take};
use crate::given::{
    NOW, bucket, entity, forever, leg, limits, plan, resource, settlement, test_namespace, tokens,
    without_refill,
};
use crate::poll::{ByHand, soon};

/// A future that has not completed after so many polls never will.
const POLLS_MAX: usize = 1_000;

fn hundred(entity: &str) -> Arc<Target> {
    forever(bucket(entity, "r"), &limits([without_refill("x", 100), without_refill("y", 100)]))
}

fn ten_of_each(target: &Arc<Target>) -> Leg {
    leg(target, [("x", tokens(10)), ("y", tokens(10))])
}

pub async fn an_acquire_that_is_never_polled_does_nothing(store: Arc<dyn Store>) {
    let [old, new] = ["old", "new"].map(hundred);
    let placement = take(&*store, NOW, [ten_of_each(&old)]).await[0].placement;
    let plan = plan(NOW, [ten_of_each(&old), ten_of_each(&new)]);
    drop(store.acquire(&plan));
    settle(&*store, NOW, [settlement(&old, placement, [("x", tokens(0))])]).await;
    assert_eq!(balance(&*store, old.key(), "x", NOW).await, Some(tokens(90)));
    let listed =
        list_buckets(&*store, BucketQuery::OnResource(test_namespace(), resource("r"))).await;
    assert_eq!(listed.len(), 1, "no bucket was created");
}

pub async fn changes_that_are_never_polled_do_nothing(store: Arc<dyn Store>) {
    let target = hundred("a");
    let placement = take(&*store, NOW, [ten_of_each(&target)]).await[0].placement;
    put(&*store, [entity("kept", None)]).await;
    let other = forever(target.key().clone(), &limits([without_refill("z", 5)]));
    drop(store.settle(&[settlement(&target, placement, [("x", tokens(10))])], NOW));
    drop(store.reconfigure(&other, NOW));
    drop(store.write(&[Write::Put(entity("new", None), Precondition::Always)]));
    drop(store.delete(&[entity("kept", None).key(), Key::Bucket(target.key().clone())]));
    // Another change goes through whatever the store queues its work in.
    put(&*store, [entity("later", None)]).await;
    settle(&*store, NOW, [settlement(&target, placement, [("x", tokens(0))])]).await;
    let found = peek(&*store, target.key(), NOW).await.expect("not deleted");
    assert_eq!(found.limits(), target.limits(), "not reconfigured");
    assert_eq!(found.cells()[0].tokens, tokens(90), "not settled");
    assert_eq!(get(&*store, entity("new", None).key()).await, None, "not written");
    assert!(get(&*store, entity("kept", None).key()).await.is_some(), "not deleted");
}

/// When a future is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drop {
    /// Right after a poll.
    AtOnce,
    /// When it has been woken: what it waited for has happened.
    WhenWoken,
}

pub async fn a_dropped_acquire_leaves_no_tokens_taken(store: Arc<dyn Store>) {
    drop_after_every_poll(&*store, Drop::AtOnce).await;
}

pub async fn an_acquire_dropped_when_its_reply_is_ready_leaves_no_tokens_taken(
    store: Arc<dyn Store>,
) {
    drop_after_every_poll(&*store, Drop::WhenWoken).await;
}

async fn drop_after_every_poll(store: &dyn Store, when: Drop) {
    for polls in 0..POLLS_MAX {
        let [child, parent] = ["child", "parent"].map(|name| hundred(&format!("{name}-{polls}")));
        // One bucket is there already, the other one would be created.
        take(store, NOW, [ten_of_each(&child)]).await;
        let completed = poll_and_drop(store, &child, &parent, polls, when).await;
        let taken = if completed { 10 } else { 0 };
        for (target, before) in [(&child, 90), (&parent, 100)] {
            let what = format!("{taken} taken, dropped {when:?} after {polls} polls");
            soon(&what, async || {
                // Whatever the store queues its work in, this goes through it.
                settle(
                    store,
                    NOW,
                    [settlement(target, Placement::default(), [("x", Millitokens::ZERO)])],
                )
                .await;
                holds(store, target, before - taken).await
            })
            .await;
        }
        if completed {
            return;
        }
        // It is not only shown, it can be taken.
        let rest = leg(&child, [("x", tokens(90)), ("y", tokens(90))]);
        let all = leg(&parent, [("x", tokens(100)), ("y", tokens(100))]);
        take(store, NOW, [rest, all]).await;
    }
    panic!("an acquire has not completed after {POLLS_MAX} polls");
}

/// Whether both limits hold so much; an absent bucket is full.
async fn holds(store: &dyn Store, target: &Target, whole: i64) -> bool {
    for limit in ["x", "y"] {
        let found = balance(store, target.key(), limit, NOW).await;
        if found.unwrap_or(tokens(100)) != tokens(whole) {
            return false;
        }
    }
    true
}

/// Polls an acquire so many times and drops it. Says whether it completed before.
async fn poll_and_drop(
    store: &dyn Store,
    child: &Arc<Target>,
    parent: &Arc<Target>,
    polls: usize,
    when: Drop,
) -> bool {
    let plan = plan(NOW, [ten_of_each(child), ten_of_each(parent)]);
    let mut call = ByHand::new(store.acquire(&plan));
    for poll in 1..=polls {
        match call.poll() {
            Poll::Ready(answer) => {
                let taken = matches!(answer, Ok(Admission::Taken(_)));
                assert!(taken, "there is enough, but the answer is {answer:?}");
                return true;
            }
            Poll::Pending if poll < polls || when == Drop::WhenWoken => call.woken().await,
            Poll::Pending => {}
        }
    }
    false
}

pub async fn a_dropped_settlement_is_carried_out(store: Arc<dyn Store>) {
    for run in 0..20 {
        let [child, parent] = ["child", "parent"].map(|name| hundred(&format!("{name}-{run}")));
        let taken = take(&*store, NOW, [ten_of_each(&child), ten_of_each(&parent)]).await;
        let back = [("x", tokens(-10)), ("y", tokens(-5))];
        let settlements = [
            settlement(&child, taken[0].placement, back),
            settlement(&parent, taken[1].placement, back),
        ];
        let mut call = ByHand::new(store.settle(&settlements, NOW));
        let polled = call.poll();
        assert!(!matches!(polled, Poll::Ready(Err(_))), "{polled:?}");
        drop(call);
        for target in [&child, &parent] {
            soon("a settlement that was polled is carried out", async || {
                balance(&*store, target.key(), "x", NOW).await == Some(tokens(100))
            })
            .await;
            let y = balance(&*store, target.key(), "y", NOW).await;
            assert_eq!(y, Some(tokens(95)), "both limits, and once");
        }
    }
}
