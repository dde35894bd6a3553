//! What must be when the clients of a run are gone.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Admission, Clock, Leg, Lifetime, Plan, Take, Timestamp};
use zae_limiter_schema::Value;

use super::super::ClientClock;
use super::super::audit::Excuse;
use super::Stage;

/// How long a shard of the slowest limit may need for a millitoken.
const LATE_MAX_S: u64 = 300;

/// A request within the ceiling that waits as long as it is told, while nobody else calls, is
/// admitted, and not a millisecond earlier.
pub(super) async fn check_liveness(stage: &Stage, bucket: usize) {
    let skew_us = stage.scene.skew_us;
    let client = stage.client(skew_us);
    // Its clock is wrong, but it stands by it.
    let offset = stage.draw(|rng| rng.i64(-skew_us..=skew_us));
    let steady = ClientClock::new(Arc::clone(&stage.world.time), skew_us, offset, 0);
    let plan = |now| Plan { now, ..client.plan(stage, bucket, false) };
    // Once in shards, always: while the client waits to hear that it has put them together, it refuses
    // by what it knows of them.
    let mut was_split = false;
    for _ in 0..3 {
        let first = plan(steady.now());
        let at = |now: Timestamp| Plan { now, legs: first.legs.clone() };
        let is_split = || first.legs.iter().any(|leg| stage.is_split(&leg.target));
        was_split |= is_split();
        let statuses = match client.ask(stage, &first, None).await {
            Some(Ok(Admission::Taken(_))) => continue,
            Some(Ok(Admission::Refused(statuses))) => statuses,
            other => return stage.world.auditor.accuse(format!("no answer in peace: {other:?}")),
        };
        let wait = statuses.iter().map(|status| status.retry_after).max().unwrap_or_default();
        let due = first.now.saturating_add(wait);
        // It may be merged as soon as it was asked.
        was_split |= is_split();
        let is_split = was_split;
        let early = Timestamp::from_millis(due.as_millis() - 1);
        for (moment, admitted) in [(early, false), (due, true)] {
            let left = Duration::from_millis(moment.millis_since(steady.now()));
            // A bucket that expires by a clock that is wrong is full that much earlier.
            let is_kept = |leg: &Leg| leg.target.lifetime() == Lifetime::Forever;
            let exact =
                (skew_us == 0 && stage.scene.jump_us == 0) || first.legs.iter().all(is_kept);
            // A shard without debt admits while another repays, and what is less than a millitoken in
            // each of two shards may be one when they are merged.
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
            let mut answer = client.ask(stage, &at(moment), None).await;
            // A shard that was split meanwhile is full a little later, by less than a millitoken.
            for _ in 0..4 {
                let Some(Ok(Admission::Refused(again))) = &answer else { break };
                if !is_split || again.iter().any(|one| one.retry_after.as_secs() > LATE_MAX_S) {
                    break;
                }
                let more = again.iter().map(|one| one.retry_after).max().unwrap_or_default();
                stage.world.auditor.excuse(Excuse::LivenessAgain);
                stage.world.time.sleep(more).await;
                answer = client.ask(stage, &at(steady.now()), None).await;
            }
            let is_admitted = matches!(answer, Some(Ok(Admission::Taken(_))));
            if is_admitted != admitted {
                stage.world.auditor.accuse(format!(
                    "told to wait {wait:?} until {due:?}; at {moment:?} admitted is {is_admitted}: \
                     {statuses:#?}\n{answer:#?}"
                ));
            }
        }
    }
}

/// Whoever asks for all that a bucket can hold gets an answer, and finds all of its shards.
pub(super) async fn check_whole(stage: &Stage, bucket: usize) {
    let client = stage.client(0);
    let target = client.target(stage, bucket);
    let takes = target.limits().rates().iter().enumerate();
    let takes = takes.map(|(cell, rate)| Take { cell, amount: rate.capacity() }).collect();
    let leg = Leg { target: Arc::clone(&target), takes };
    let plan = Plan { now: client.clock.now(), legs: [leg].into_iter().collect() };
    let auditor = &stage.world.auditor;
    let answer = client.ask(stage, &plan, None).await;
    if !matches!(answer, Some(Ok(_))) {
        auditor.accuse(format!("no answer in peace: {answer:?}"));
    }
    if !auditor.is_complete(target.key()) {
        auditor.accuse(format!("shards of {:?} are missing", target.key()));
    }
}

/// All buckets were deleted. A bucket that expired after a merge takes with it what it knew of its retired
/// shards; these hold nothing and expire by themselves.
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
        stage.world.auditor.accuse(format!("left of buckets that were deleted: {left:#?}"));
    }
}
