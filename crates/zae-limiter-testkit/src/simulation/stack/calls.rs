//! The calls of the limiters.

use std::sync::atomic::Ordering;
use std::time::Duration;

use fastrand::Rng;
use zae_limiter_core::{BreakerSettings, Error, Lease};

use super::super::workload::locked;
use super::{Client, Place, RESOURCE, Stage};

/// How much later than its deadline a call may end: the steps after the timer take no time.
const LATE_MAX_US: u64 = 1_000;

/// A call in progress. Unless `is_sure` is set, the outcome for its tokens counts as unknown.
struct Holding<'a> {
    stage: &'a Stage,
    at: &'a Place,
    is_sure: bool,
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        if self.is_sure {
            return;
        }
        let above = |place: &&Place| place.parent.map(|parent| &self.stage.entities[parent]);
        let chain = std::iter::successors(Some(self.at), above);
        locked(&self.stage.unsure).extend(chain.map(|place| place.id.clone()));
    }
}

impl Client {
    fn disturb_clock(&self, stage: &Stage) {
        if stage.is_calm.load(Ordering::Relaxed) {
            return;
        }
        let (skew_us, jump_us) = (stage.scene.skew_us, stage.scene.jump_us);
        match stage.draw(|rng| rng.u32(..60)) {
            0..=2 => self.clock.set_offset(stage.draw(|rng| rng.i64(-skew_us..=skew_us))),
            3..=12 => self.clock.jump(0),
            13 if jump_us > 0 => {
                self.clock.jump(if stage.draw(Rng::bool) { jump_us } else { -jump_us });
            }
            _ => {}
        }
    }

    /// Checks that a call ends in time, and that an outage has a cause.
    async fn in_time<T>(
        &self,
        stage: &Stage,
        what: &str,
        work: impl IntoFuture<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let (before, began_us) = (self.signs.so_far(), stage.world.time.now_us());
        let done = work.into_future().await;
        let took_us = stage.world.time.now_us() - began_us;
        let most_us = u64::try_from(self.deadline.as_micros()).unwrap_or(u64::MAX / 2);
        if took_us > most_us + LATE_MAX_US {
            let most = self.deadline;
            stage.report_violation(format!("{what} took {took_us} us, its deadline is {most:?}"));
        }
        if took_us >= most_us {
            self.signs.add();
        }
        let is_outage = matches!(&done, Err(Error::Unavailable { cause, .. }) if cause.is_outage());
        let is_unseen = self.signs.so_far().ever == before.ever;
        if is_outage && is_unseen && before.in_a_row < BreakerSettings::default().failures {
            let (id, error) = (self.id, done.as_ref().err());
            stage.report_violation(format!(
                "client {id}: {what}: an outage without a cause: {error:?}"
            ));
        }
        done
    }

    pub(super) async fn call(&self, stage: &Stage) {
        self.disturb_clock(stage);
        let place = &stage.entities[stage.draw(|rng| rng.usize(..stage.entities.len()))];
        if stage.draw(|rng| rng.f64()) < stage.scene.config_changes {
            let version = stage.draw(|rng| rng.usize(..place.versions.len()));
            let limits = place.versions[version].clone();
            // It may fail, and may be applied even then.
            let set = self.limiter.set_limits(&place.id, Some(RESOURCE), limits).await;
            locked(&stage.report).reconfigured += u64::from(set.is_ok());
            return;
        }
        // If limits change, most callers name the present ones.
        let mut named = place.versions[0].clone();
        if stage.scene.config_changes > 0.0
            && stage.draw(|rng| rng.u32(..8)) > 0
            && let Ok(effective) = self.limiter.effective_limits(&place.id, RESOURCE).await
        {
            named = effective.limits;
        }
        let names: Vec<(&str, u64)> = stage.draw(|rng| {
            let is_post_paid = rng.f64() < stage.scene.post_paid;
            let first = rng.usize(..named.len());
            let mut names = Vec::new();
            for (at, limit) in named.iter().enumerate() {
                if at == first || rng.u32(..4) > 0 {
                    let most = if is_post_paid { 0 } else { (limit.capacity / 4).max(1) };
                    names.push((limit.name.as_str(), rng.u64(0..=most)));
                }
            }
            names
        });
        let mut acquire = self.limiter.acquire(&place.id, RESOURCE);
        for (name, amount) in &names {
            acquire = acquire.take(name, *amount);
        }
        // If the task is aborted here, the outcome stays unknown.
        let mut holding = Holding { stage, at: place, is_sure: false };
        let acquired = self.in_time(stage, "acquire", acquire).await;
        let lease = match acquired {
            Ok(lease) => lease,
            Err(error) => {
                holding.is_sure = true;
                return stage.note_error(&error);
            }
        };
        {
            let mut report = locked(&stage.report);
            *if lease.is_degraded() { &mut report.degraded } else { &mut report.admitted } += 1;
        }
        holding.is_sure = self.use_lease(stage, &place.id, lease, &names).await;
    }

    /// Uses a lease to its end. Returns whether the outcome for its tokens is known.
    async fn use_lease(
        &self,
        stage: &Stage,
        entity: &str,
        mut lease: Lease,
        names: &[(&str, u64)],
    ) -> bool {
        if stage.scene.long_leases && stage.draw(|rng| rng.u32(..8)) == 0 {
            let wait = stage.draw(|rng| rng.u64(60..48 * 3_600));
            stage.world.time.sleep(Duration::from_secs(wait)).await;
        } else if stage.draw(Rng::bool) {
            stage.pause().await;
        }
        // For each name: whether a difference is pending, and what is known to be used.
        let mut said: Vec<(i64, Option<i64>)> = vec![(0, None); names.len()];
        for (at, (name, amount)) in names.iter().enumerate() {
            let (choice, by) = stage.draw(|rng| (rng.u32(..6), rng.u64(..=amount + 3)));
            let before = lease.held(name);
            // Releasing more than the lease holds is an error that changes nothing.
            let done = match choice {
                0 => lease.settle(name, by).inspect(|()| said[at].1 = lease.held(name)),
                1 => lease.release(name, by.min(*amount)),
                2 => lease.adjust(name, i64::try_from(by).unwrap_or(0)),
                3 if by < 3 => {
                    match self.in_time(stage, "consume", lease.consume(name, by)).await {
                        Ok(()) => Ok(()),
                        Err(error) => {
                            stage.note_error(&error);
                            Ok(())
                        }
                    }
                }
                4 => {
                    let flushed = self.in_time(stage, "flush", lease.flush()).await;
                    match flushed {
                        Err(error) => stage.note_error(&error),
                        Ok(()) => {
                            for ((name, _), (gathered, used)) in names.iter().zip(&mut said) {
                                *used = if *gathered == 0 { *used } else { lease.held(name) };
                                *gathered = 0;
                            }
                        }
                    }
                    Ok(())
                }
                _ => Ok(()),
            };
            if done.is_ok() && choice <= 2 {
                said[at].0 += lease.held(name).unwrap_or(0) - before.unwrap_or(0);
            }
        }
        match stage.draw(|rng| rng.u32(..6)) {
            0 => {
                locked(&stage.report).dropped += 1;
                let mut used = locked(&stage.used);
                for ((name, _), (_, of_limit)) in names.iter().zip(said) {
                    let key = (entity.to_owned(), (*name).to_owned());
                    *used.entry(key).or_default() += of_limit.unwrap_or(0);
                }
                let is_sure = !lease.is_degraded();
                drop(lease);
                return is_sure;
            }
            1 | 2 => {
                let done = self.in_time(stage, "rollback", lease.rollback()).await;
                if let Err(error) = done {
                    stage.note_error(&error);
                }
            }
            _ => {
                let held: Vec<_> =
                    names.iter().map(|(name, _)| (*name, lease.held(name))).collect();
                // The commit then has nothing left to write.
                let flushed = self.in_time(stage, "flush", lease.flush()).await;
                let is_degraded = lease.is_degraded();
                let committed = self.in_time(stage, "commit", lease.commit()).await;
                match flushed.and(committed) {
                    Ok(()) if !is_degraded => {
                        locked(&stage.report).committed += 1;
                        let mut kept = locked(&stage.kept);
                        for (name, held) in held {
                            let key = (entity.to_owned(), name.to_owned());
                            *kept.entry(key).or_default() += held.unwrap_or(0);
                        }
                    }
                    // Some of it may be taken, but it is not confirmed.
                    Ok(()) => return false,
                    Err(error) => stage.note_error(&error),
                }
            }
        }
        true
    }
}

impl Stage {
    pub(super) fn note_error(&self, error: &Error) {
        match error {
            Error::Exceeded(_) | Error::ExceedsCapacity(_) => locked(&self.report).refused += 1,
            // The limit was removed after the caller had read it.
            Error::UnknownLimits { .. } => locked(&self.report).unknown += 1,
            Error::Unavailable { .. } => locked(&self.report).unavailable += 1,
            other => self.report_violation(format!("an unexpected error: {other:?}")),
        }
    }
}
