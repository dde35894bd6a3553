//! Checks after the clients of a run have ended.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Admission, Clock, Leg, Lifetime, Plan, Take, Timestamp};
use zae_limiter_schema::Value;

use super::super::ClientClock;
use super::super::audit::Excuse;
use super::Stage;

/// The longest time that a shard of the slowest limit needs for a millitoken, in seconds.
const LATE_MAX_S: u64 = 300;

/// Liveness: a request within the ceiling is admitted after its retry-after if there are no other
/// calls, and not a millisecond earlier.
pub(super) async fn check_liveness(stage: &Stage, bucket: usize) {
    let skew_us = stage.scene.skew_us;
    let client = stage.client(skew_us);
    // The clock is wrong, but its error is constant.
    let offset = stage.draw(|rng| rng.i64(-skew_us..=skew_us));
    let steady = ClientClock::new(Arc::clone(&stage.world.time), skew_us, offset, 0);
    let plan = |now| Plan { now, ..client.plan(stage, bucket, false) };
    // Counts as split from then on: until the client has the reply to a merge, it refuses by its
    // snapshots of the shards.
    let mut was_split = false;
    for _ in 0..3 {
        let first = plan(steady.now());
        let at = |now: Timestamp| Plan { max_skew: None, now, legs: first.legs.clone() };
        let is_split = || first.legs.iter().any(|leg| stage.is_split(&leg.target));
        was_split |= is_split();
        let statuses = match client.call_acquire(stage, &first, None).await {
            Some(Ok(Admission::Taken(_))) => continue,
            Some(Ok(Admission::Refused(statuses))) => statuses,
            other => {
                return stage
                    .world
                    .auditor
                    .report_violation(format!("no reply without faults: {other:?}"));
            }
        };
        let wait = statuses.iter().map(|status| status.retry_after).max().unwrap_or_default();
        let due = first.now.saturating_add(wait);
        // The call may have merged it.
        was_split |= is_split();
        let is_split = was_split;
        let early = Timestamp::from_millis(due.as_millis() - 1);
        for (moment, admitted) in [(early, false), (due, true)] {
            let left = Duration::from_millis(moment.millis_since(steady.now()));
            // A bucket that expires early by a wrong clock is full that much earlier.
            let is_kept = |leg: &Leg| leg.target.lifetime() == Lifetime::Forever;
            let exact =
                (skew_us == 0 && stage.scene.jump_us == 0) || first.legs.iter().all(is_kept);
            // A shard without debt admits while another repays. And two fractions of a millitoken
            // may add up to one when shards merge.
            let exact = exact && !is_split;
            if !admitted && (left.is_zero() || !exact) {
                if !left.is_zero() {
                    let sharded = Excuse::LivenessSharded;
                    let excuse = if is_split { sharded } else { Excuse::LivenessSkewed };
                    stage.world.auditor.excuse(excuse);
                }
                continue;
            }
            stage.world.time.sleep(left).await;
            let mut reply = client.call_acquire(stage, &at(moment), None).await;
            // A shard that was split meanwhile may lack a fraction of a millitoken.
            for _ in 0..4 {
                let Some(Ok(Admission::Refused(again))) = &reply else { break };
                if !is_split || again.iter().any(|one| one.retry_after.as_secs() > LATE_MAX_S) {
                    break;
                }
                let more = again.iter().map(|one| one.retry_after).max().unwrap_or_default();
                stage.world.auditor.excuse(Excuse::LivenessAgain);
                stage.world.time.sleep(more).await;
                reply = client.call_acquire(stage, &at(steady.now()), None).await;
            }
            let is_admitted = matches!(reply, Some(Ok(Admission::Taken(_))));
            if is_admitted != admitted {
                stage.world.auditor.report_violation(format!(
                    "the wait is {wait:?} until {due:?}; at {moment:?} admitted is {is_admitted}: \
                     {statuses:#?}\n{reply:#?}"
                ));
            }
        }
    }
}

/// A request for the whole capacity of a bucket gets a reply, and restores all of its shards.
pub(super) async fn check_whole(stage: &Stage, bucket: usize) {
    let client = stage.client(0);
    let target = client.target(stage, bucket);
    let takes = target.limits().rates().iter().enumerate();
    let takes = takes.map(|(cell, rate)| Take { cell, amount: rate.capacity() }).collect();
    let leg = Leg { target: Arc::clone(&target), takes };
    let plan = Plan { max_skew: None, now: client.now(), legs: [leg].into_iter().collect() };
    let auditor = &stage.world.auditor;
    let reply = client.call_acquire(stage, &plan, None).await;
    if !matches!(reply, Some(Ok(_))) {
        auditor.report_violation(format!("no reply without faults: {reply:?}"));
    }
    if !auditor.is_complete(target.key()) {
        auditor.report_violation(format!("shards of {:?} are missing", target.key()));
    }
}

/// After all buckets were deleted, only retired shards may remain. A bucket that expired after a
/// merge no longer lists its retired shards. These hold nothing and expire by themselves.
pub(super) fn check_nothing_left(stage: &Stage) {
    let buckets = stage.world.table.items().into_iter().filter(|item| item.contains_key("rf"));
    let (retired, left): (Vec<_>, Vec<_>) = buckets.partition(|item| {
        let number = |name: &str| item.get(name).and_then(Value::as_i64);
        let shard = item.get("PK").and_then(Value::as_str).and_then(|pk| pk.rsplit('#').next());
        let shard = shard.and_then(|shard| shard.parse::<i64>().ok());
        number("ttl").is_some() && shard > Some(0) && shard >= number("shard_count")
    });
    retired.iter().for_each(|_| stage.world.auditor.excuse(Excuse::RetiredLeft));
    if !left.is_empty() {
        stage.world.auditor.report_violation(format!("items of deleted buckets remain: {left:#?}"));
    }
}
