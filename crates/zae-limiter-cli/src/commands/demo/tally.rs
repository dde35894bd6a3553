//! The counts of the run so far.

use crate::overadmission::{LimitCheck, Span};

use super::cast::{CAST, LIMITS, chain};

/// Columns of the sparkline of recent traffic, each half a second.
pub(super) const RECENT: usize = 12;
const RECENT_MS: u64 = 500;

/// The counts of one member, including the calls of its descendants.
#[derive(Debug, Default)]
pub(super) struct Member {
    pub admitted: u64,
    pub refused: u64,
    /// In the order of [`LIMITS`]; `None` where it has no such limit.
    pub checks: [Option<LimitCheck>; LIMITS.len()],
    /// Refused calls that exceeded the limit, in the order of [`LIMITS`].
    pub refusals: [u64; LIMITS.len()],
    /// Admitted calls by half seconds.
    recent: Vec<u64>,
}

/// The counts of the run so far.
#[derive(Debug)]
pub(super) struct Tally {
    pub members: Vec<Member>,
    /// Admitted and refused calls by seconds.
    pub seconds: Vec<(u64, u64)>,
    pub admitted: u64,
    pub refused: u64,
    /// Calls that failed and were refunded.
    pub failed: u64,
    /// Calls that used more than they had estimated.
    pub underestimated: u64,
    pub elapsed_ms: u64,
}

impl Tally {
    pub(super) fn new() -> Self {
        let members = CAST.iter().map(|member| Member {
            checks: LIMITS.map(|limit| member.rate(limit).map(LimitCheck::new)),
            ..Member::default()
        });
        Self {
            members: members.collect(),
            seconds: Vec::new(),
            admitted: 0,
            refused: 0,
            failed: 0,
            underestimated: 0,
            elapsed_ms: 0,
        }
    }

    /// Records an admitted call, with its amounts in the order of [`LIMITS`].
    pub(super) fn admit(&mut self, key: usize, amounts: [u64; LIMITS.len()], span: Span) {
        self.admitted += 1;
        self.this_second().0 += 1;
        let half_second = place(self.elapsed_ms, RECENT_MS);
        for member in chain(key) {
            let member = &mut self.members[member];
            member.admitted += 1;
            if member.recent.len() <= half_second {
                member.recent.resize(half_second + 1, 0);
            }
            member.recent[half_second] += 1;
            for (check, amount) in member.checks.iter_mut().zip(amounts) {
                if let Some(check) = check {
                    check.admit(amount, span);
                }
            }
        }
    }

    /// Records a refused call.
    pub(super) fn refuse(&mut self, key: usize) {
        self.refused += 1;
        self.this_second().1 += 1;
        for member in chain(key) {
            self.members[member].refused += 1;
        }
    }

    /// Records that a refused call exceeded this limit.
    pub(super) fn refused_by(&mut self, entity: &str, limit: &str) {
        let member = CAST.iter().position(|member| member.id == entity);
        let limit = LIMITS.iter().position(|name| *name == limit);
        if let (Some(member), Some(limit)) = (member, limit) {
            self.members[member].refusals[limit] += 1;
        }
    }

    /// Records a settlement, with its differences in the order of [`LIMITS`].
    pub(super) fn settle(&mut self, key: usize, differences: [i64; LIMITS.len()], span: Span) {
        for member in chain(key) {
            for (check, difference) in self.members[member].checks.iter_mut().zip(differences) {
                if let (Some(check), true) = (check, difference != 0) {
                    check.settle(difference, span);
                }
            }
        }
    }

    fn this_second(&mut self) -> &mut (u64, u64) {
        let second = place(self.elapsed_ms, 1_000);
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, (0, 0));
        }
        &mut self.seconds[second]
    }

    /// All checks, with the indices of member and limit.
    pub(super) fn checks(&self) -> impl Iterator<Item = (usize, usize, &LimitCheck)> {
        self.members.iter().enumerate().flat_map(|(member, tally)| {
            let checks = tally.checks.iter().enumerate();
            checks.filter_map(move |(limit, check)| Some((member, limit, check.as_ref()?)))
        })
    }

    /// A member's admitted calls in the last whole half seconds.
    pub(super) fn recent(&self, member: usize) -> Vec<u64> {
        let now = place(self.elapsed_ms, RECENT_MS);
        let recent = &self.members[member].recent;
        let all = now.saturating_sub(RECENT)..now;
        all.map(|half_second| recent.get(half_second).copied().unwrap_or(0)).collect()
    }
}

fn place(elapsed_ms: u64, unit_ms: u64) -> usize {
    usize::try_from(elapsed_ms / unit_ms).expect("the run is an hour at most")
}
