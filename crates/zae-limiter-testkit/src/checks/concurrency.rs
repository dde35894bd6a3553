//! Many callers at once, on several threads.

use std::future::Future;
use std::sync::Arc;

use fastrand::Rng;
use zae_limiter_core::{Admission, Leg, Store, Target};

use crate::calls::{acquire, balance, settle, take};
use crate::given::{NOW, bucket, forever, leg, limits, plan, settlement, tokens, without_refill};
use crate::poll::soon;

pub(super) const TASKS: usize = 64;

/// Runs so many tasks at once and gathers what they give.
pub(super) async fn crowd<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    store: &Arc<dyn Store>,
    task: impl Fn(usize, Arc<dyn Store>) -> F,
) -> Vec<T> {
    let tasks: Vec<_> =
        (0..TASKS).map(|number| tokio::spawn(task(number, Arc::clone(store)))).collect();
    let mut gathered = Vec::new();
    for task in tasks {
        gathered.push(task.await.expect("no task panics"));
    }
    gathered
}

fn thousand(entity: &str) -> Arc<Target> {
    forever(bucket(entity, "r"), &limits([without_refill("x", 1_000)]))
}

fn one(target: &Arc<Target>) -> Leg {
    leg(target, [("x", tokens(1))])
}

fn is_taken(admission: &Admission) -> bool {
    matches!(admission, Admission::Taken(_))
}

pub async fn many_tasks_together_take_exactly_the_capacity(store: Arc<dyn Store>) {
    let target = thousand("a");
    let admitted = crowd(&store, |_, store| {
        let target = Arc::clone(&target);
        async move {
            let mut admitted = 0;
            for _ in 0..25 {
                let plan = plan(NOW, [one(&target)]);
                let answer = match store.acquire_now(&plan) {
                    Some(answer) => answer.expect("an answer"),
                    None => acquire(&*store, &plan).await,
                };
                admitted += usize::from(is_taken(&answer));
            }
            admitted
        }
    })
    .await;
    assert_eq!(admitted.iter().sum::<usize>(), 1_000, "of {} requested", TASKS * 25);
    assert_eq!(balance(&*store, target.key(), "x", NOW).await, Some(tokens(0)));
}

pub async fn chains_in_opposite_order_do_not_deadlock(store: Arc<dyn Store>) {
    let targets = ["a", "b", "c"].map(thousand);
    let taken = crowd(&store, |number, store| {
        let targets = targets.clone();
        async move {
            // Every order of every two, and of all three.
            let mut chain = targets.to_vec();
            chain.rotate_left(number % 3);
            if number % 2 == 0 {
                chain.reverse();
            }
            chain.truncate(2 + number % 4 / 2);
            let mut taken = [0; 3];
            for _ in 0..20 {
                let plan = plan(NOW, chain.iter().map(one));
                if is_taken(&acquire(&*store, &plan).await) {
                    for target in &chain {
                        let at = targets.iter().position(|t| Arc::ptr_eq(t, target));
                        taken[at.expect("one of the three")] += 1;
                    }
                }
            }
            taken
        }
    })
    .await;
    for (at, target) in targets.iter().enumerate() {
        let left = 1_000 - taken.iter().map(|taken| taken[at]).sum::<i64>();
        let found = balance(&*store, target.key(), "x", NOW).await;
        assert_eq!(found, Some(tokens(left)), "what is left is what was not taken");
    }
}

pub async fn a_chain_is_seen_whole_or_not_at_all(store: Arc<dyn Store>) {
    // As long as a chain can be: the more buckets, the more can come in between.
    let chain: Arc<Vec<_>> =
        Arc::new((0..8).map(|level| thousand(&format!("level-{level}"))).collect());
    take(&*store, NOW, chain.iter().map(one)).await;
    crowd(&store, |number, store| {
        let chain = Arc::clone(&chain);
        async move {
            let keys: Vec<_> = chain.iter().map(|target| target.key().clone()).collect();
            for _ in 0..30 {
                if number % 2 == 0 {
                    take(&*store, NOW, chain.iter().map(one)).await;
                } else {
                    let found = store.peek(&keys, NOW).await.expect("peek must answer");
                    let buckets = found.into_iter().map(|bucket| bucket.expect("it is there"));
                    let left: Vec<_> = buckets.map(|bucket| bucket.cells()[0].tokens).collect();
                    let whole = left.iter().all(|level| *level == left[0]);
                    assert!(whole, "a chain was seen half taken: {left:?}");
                }
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
}

pub async fn every_concurrent_settlement_counts(store: Arc<dyn Store>) {
    let target = thousand("a");
    // Half full, so that no order of them is cut at the capacity.
    let placement = take(&*store, NOW, [leg(&target, [("x", tokens(500))])]).await[0].placement;
    crowd(&store, |number, store| {
        let target = Arc::clone(&target);
        async move {
            for _ in 0..10 {
                let difference = if number % 2 == 0 { tokens(3) } else { tokens(-1) };
                settle(&*store, NOW, [settlement(&target, placement, [("x", difference)])]).await;
            }
        }
    })
    .await;
    let left = 500 - 32 * 10 * 3 + 32 * 10;
    assert_eq!(balance(&*store, target.key(), "x", NOW).await, Some(tokens(left)));
}

pub async fn aborted_acquires_leave_what_the_others_took(store: Arc<dyn Store>) {
    let [child, parent] = ["child", "parent"].map(thousand);
    take(&*store, NOW, [one(&child), one(&parent)]).await;
    let mut random = Rng::with_seed(7);
    let mut taken = 1;
    for _ in 0..10 {
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let (store, child, parent) =
                    (Arc::clone(&store), Arc::clone(&child), Arc::clone(&parent));
                tokio::spawn(async move {
                    let plan = plan(NOW, [one(&child), one(&parent)]);
                    is_taken(&acquire(&*store, &plan).await)
                })
            })
            .collect();
        for task in &tasks {
            match random.u32(0..3) {
                0 => task.abort(),
                1 => tokio::task::yield_now().await,
                _ => {}
            }
        }
        for task in tasks {
            match task.await {
                Ok(admitted) => taken += i64::from(admitted),
                Err(aborted) => assert!(aborted.is_cancelled(), "no task panics"),
            }
        }
    }
    for target in [&child, &parent] {
        soon("an aborted acquire gives back what it took", async || {
            balance(&*store, target.key(), "x", NOW).await == Some(tokens(1_000 - taken))
        })
        .await;
    }
}
