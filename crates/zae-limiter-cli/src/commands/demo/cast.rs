//! Who is in it: an organisation, its projects, their keys, and the limits of each.

use zae_limiter::model::{LimitSet, Rate};
use zae_limiter::{Limit, RateLimiter};

use crate::failure::Failure;

/// What is called.
pub(super) const RESOURCE: &str = "gpt-4";

/// What each call takes of.
pub(super) const LIMITS: [&str; 2] = ["rpm", "tpm"];

pub(super) const INTRODUCTION: &str = "\
    acme has two projects with three API keys each. A call takes 1 request (rpm) and an estimate \
    of its tokens (tpm) from its key, its project and acme: all or none. When it is done it settles \
    for what it used, which may leave debt; if it fails it gives everything back.";

/// Somebody with limits.
#[derive(Debug)]
pub(super) struct Member {
    pub id: &'static str,
    /// The place of the one above in the cast.
    pub parent: Option<usize>,
    /// How it hangs in the tree.
    pub branch: &'static str,
    /// Requests and tokens per minute, and how many of each can be saved up.
    pub requests: Option<(u64, u64)>,
    pub tokens: (u64, u64),
    /// Whether it has limits of its own, or those that everybody has on the resource.
    pub own_limits: bool,
    /// On an ordinary day; only keys call.
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

/// A key with the limits that everybody has.
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

/// All of them; everybody stands behind the one above.
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
    /// Its limits, as they are set.
    pub(super) fn limits(&self) -> Vec<Limit> {
        let limit =
            |name: &str, (rate, burst): (u64, u64)| Limit::per_minute(name, rate).burst(burst);
        let requests = self.requests.map(|numbers| limit(LIMITS[0], numbers));
        requests.into_iter().chain([limit(LIMITS[1], self.tokens)]).collect()
    }

    /// The numbers of one of its limits.
    pub(super) fn rate(&self, name: &str) -> Option<Rate> {
        let limits = LimitSet::new(self.limits()).expect("the cast is written down correctly");
        limits.position(name).map(|at| limits.rates()[at])
    }
}

/// The places of a member and of all above it.
pub(super) fn chain(place: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(place), |place| CAST[*place].parent)
}

/// The keys.
pub(super) fn keys() -> impl Iterator<Item = usize> {
    (0..CAST.len()).filter(|place| CAST[*place].calls_per_minute > 0)
}

/// Creates everybody and sets their limits.
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
