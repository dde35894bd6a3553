//! The entities of the demo: an organisation, its projects, their keys, and their limits.

use zae_limiter::model::{LimitSet, Rate};
use zae_limiter::{Limit, RateLimiter};

use crate::failure::Failure;

pub(super) const RESOURCE: &str = "gpt-4";

/// The limits that each call takes from.
pub(super) const LIMITS: [&str; 2] = ["rpm", "tpm"];

pub(super) const INTRODUCTION: &str = "\
    acme has two projects with three API keys each. A call takes 1 request (rpm) and an estimate \
    of its tokens (tpm) from its key, its project and acme: all or none. When it is done it settles \
    for what it used, which may leave debt. If it fails, everything is refunded.";

/// An entity of the demo.
#[derive(Debug)]
pub(super) struct Member {
    pub id: &'static str,
    /// Index of the parent in [`CAST`].
    pub parent: Option<usize>,
    /// The lines of the tree in front of the id.
    pub branch: &'static str,
    /// Requests per minute and burst.
    pub requests: Option<(u64, u64)>,
    /// Tokens per minute and burst.
    pub tokens: (u64, u64),
    /// Whether it has limits of its own, or the resource's defaults.
    pub own_limits: bool,
    /// Average calls at 100 % traffic; 0 except for keys.
    pub calls_per_minute: u64,
}

const fn above(id: &'static str, branch: &'static str, parent: Option<usize>) -> Member {
    Member {
        id,
        parent,
        branch,
        requests: None,
        tokens: (0, 0),
        own_limits: true,
        calls_per_minute: 0,
    }
}

/// A key with the resource's default limits.
const fn key(
    id: &'static str,
    branch: &'static str,
    parent: usize,
    calls_per_minute: u64,
) -> Member {
    Member {
        id,
        parent: Some(parent),
        branch,
        requests: Some((240, 12)),
        tokens: (150_000, 10_000),
        own_limits: false,
        calls_per_minute,
    }
}

/// All entities; each comes after its parent.
pub(super) const CAST: [Member; 9] = [
    Member { tokens: (600_000, 40_000), ..above("acme", "", None) },
    Member {
        requests: Some((780, 40)),
        tokens: (420_000, 30_000),
        ..above("chat", "├─ ", Some(0))
    },
    key("web", "│  ├─ ", 1, 240),
    key("mobile", "│  ├─ ", 1, 330),
    Member {
        requests: Some((480, 40)),
        tokens: (270_000, 24_000),
        own_limits: true,
        ..key("agents", "│  └─ ", 1, 540)
    },
    Member {
        requests: Some((600, 30)),
        tokens: (300_000, 24_000),
        ..above("search", "└─ ", Some(0))
    },
    key("site", "   ├─ ", 5, 270),
    key("evals", "   ├─ ", 5, 150),
    key("indexer", "   └─ ", 5, 420),
];

impl Member {
    /// Its limits.
    pub(super) fn limits(&self) -> Vec<Limit> {
        let limit =
            |name: &str, (rate, burst): (u64, u64)| Limit::per_minute(name, rate).burst(burst);
        let requests = self.requests.map(|numbers| limit(LIMITS[0], numbers));
        requests.into_iter().chain([limit(LIMITS[1], self.tokens)]).collect()
    }

    /// The rate of one of its limits.
    pub(super) fn rate(&self, name: &str) -> Option<Rate> {
        let limits = LimitSet::new(self.limits()).expect("the cast is written down correctly");
        limits.position(name).map(|at| limits.rates()[at])
    }
}

/// The indices of a member and its ancestors.
pub(super) fn chain(place: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(place), |place| CAST[*place].parent)
}

/// The indices of the keys.
pub(super) fn keys() -> impl Iterator<Item = usize> {
    (0..CAST.len()).filter(|place| CAST[*place].calls_per_minute > 0)
}

/// Creates the entities and sets their limits.
pub(super) async fn set_up(limiter: &RateLimiter) -> Result<(), Failure> {
    let everybody = CAST.iter().find(|member| !member.own_limits).expect("there are such keys");
    limiter.set_resource_defaults(RESOURCE, everybody.limits()).await?;
    for member in &CAST {
        let entity = limiter.create_entity(member.id);
        match member.parent {
            Some(parent) => entity.parent(CAST[parent].id).cascade().await?,
            None => entity.await?,
        };
        if member.own_limits {
            limiter.set_limits(member.id, Some(RESOURCE), member.limits()).await?;
        }
    }
    Ok(())
}
