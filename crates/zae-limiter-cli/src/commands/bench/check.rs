//! The over-admission check of a bench run.

use serde::Serialize;
use zae_limiter::model::Rate;

use crate::overadmission;

use super::load::Measured;

/// A limit that the load takes from.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    /// `None` for the temporary entities, each of which has this limit.
    pub entity: Option<String>,
    pub limit: String,
    pub rate: Rate,
    /// Tokens that each admitted call takes.
    pub amount: u64,
}

impl Watched {
    /// `rpm:100/60s:150`, with the entity in front if there is one.
    pub(super) fn to_text(&self) -> String {
        let entity = self.entity.as_ref().map_or(String::new(), |entity| format!("{entity} "));
        let (rate, period) = (self.rate.refill_amount(), self.rate.period_ms() / 1_000);
        format!("{entity}{}:{rate}/{period}s:{}", self.limit, self.rate.capacity())
    }
}

/// The result for one limit.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Checked {
    pub entity: Option<String>,
    pub limit: String,
    /// Tokens admitted, summed over all entities.
    pub admitted: u128,
    /// Tokens allowed, summed over all entities.
    pub allowed: i128,
    /// Tokens beyond an entity's allowance, summed over all entities.
    pub over_admitted: i128,
}

/// Compares what was admitted with what is allowed, entity by entity.
pub(super) fn check(watched: &[Watched], measured: &Measured) -> Vec<Checked> {
    let (first, last) = measured.span;
    let elapsed = last.millis_since(first);
    let check = |watched: &Watched| {
        let mut checked = Checked {
            entity: watched.entity.clone(),
            limit: watched.limit.clone(),
            admitted: 0,
            allowed: 0,
            over_admitted: 0,
        };
        for calls in &measured.admitted_by_entity {
            let tokens = u128::from(*calls) * u128::from(watched.amount);
            checked.admitted += tokens;
            checked.allowed += overadmission::allowed(&watched.rate, elapsed);
            checked.over_admitted += overadmission::over_admitted(&watched.rate, elapsed, tokens);
        }
        checked
    };
    watched.iter().map(check).collect()
}

#[cfg(test)]
mod tests {
    use zae_limiter::model::LimitSet;
    use zae_limiter::{Limit, Timestamp};

    use super::*;
    use crate::commands::bench::histogram::Histogram;

    #[test]
    fn each_entity_is_checked_by_itself() {
        let limits = LimitSet::new([Limit::per_minute("rpm", 60).burst(10)]).unwrap();
        let watched =
            [Watched { entity: None, limit: "rpm".to_owned(), rate: limits.rates()[0], amount: 2 }];
        let measured = |admitted_by_entity: Vec<u64>| Measured {
            elapsed: std::time::Duration::ZERO,
            admitted: admitted_by_entity.iter().sum(),
            refused: 0,
            failed: 0,
            first_failure: None,
            latency: Histogram::new(),
            admitted_by_entity,
            span: (Timestamp::from_millis(500), Timestamp::from_millis(2_500)),
            interrupt: None,
            cost: None,
        };
        // Twelve tokens each in two seconds, two for each call.
        let sound = check(&watched, &measured(vec![6, 0, 6]));
        assert_eq!((sound[0].admitted, sound[0].allowed, sound[0].over_admitted), (24, 36, 0));
        let wrong = check(&watched, &measured(vec![7, 0, 0]));
        assert_eq!((wrong[0].admitted, wrong[0].allowed, wrong[0].over_admitted), (14, 36, 2));
    }
}
