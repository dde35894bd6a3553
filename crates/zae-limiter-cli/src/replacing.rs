//! `set-defaults` and `set-limits`: replace the limits of a level, and name those that no longer hold.

use serde::Serialize;
use zae_limiter::model::ConfigLevel;
use zae_limiter::{Config, Error, Limit, OnUnavailable, RateLimiter};

use crate::context::{Context, Yes};
use crate::failure::Failure;
use crate::stored::{self, ConfigJson, LimitJson, describe, texts};

/// How often a change is tried again because another client changes the same limits.
const ATTEMPTS_MAX: u32 = 16;

/// The requested change of a level.
pub(crate) struct Change {
    pub level: ConfigLevel,
    /// `None` keeps the stored limits.
    pub limits: Option<Vec<Limit>>,
    pub on_unavailable: Option<OnUnavailable>,
    pub yes: Yes,
}

/// What is stored now, and what no longer holds.
pub(crate) struct Replaced {
    pub config: Config,
    dropped: Dropped,
    /// Whether the user has confirmed what no longer holds.
    asked: bool,
}

/// Limits that held before a change and do not hold after it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dropped {
    limits: Vec<Limit>,
    /// Where they were set, if not at the changed level itself.
    hidden_from: Option<ConfigLevel>,
    /// The level above that also has some of these limits. They do not apply either.
    also_at: Option<ConfigLevel>,
}

#[derive(Serialize)]
struct SetJson {
    #[serde(flatten)]
    config: ConfigJson,
    /// The limits that held before and no longer hold.
    dropped: Vec<LimitJson>,
}

/// Replaces the limits of a level. Asks first if limits would no longer hold and somebody can answer; scripts replace
/// limits on purpose.
///
/// # Errors
///
/// When the user says no, or the store cannot be read or written.
pub(crate) async fn replace(
    change: Change,
    limiter: &RateLimiter,
    context: &mut Context,
) -> Result<Replaced, Failure> {
    let Change { level, limits, on_unavailable, yes } = change;
    for _ in 0..ATTEMPTS_MAX {
        let stored = limiter.stored_limits(&level).await?;
        let own = stored.as_ref().map(|config| config.limits.to_limits()).unwrap_or_default();
        let new = limits.clone().unwrap_or_else(|| own.clone());
        let above = inherited(&level, limiter).await?;
        let dropped = Dropped::between(&own, above, &new);
        let asked = !dropped.limits.is_empty()
            && context
                .confirm_if_possible(yes, &dropped.words(&level, "will no longer hold"))
                .await?;
        // What was shown is what is replaced: if the stored limits have changed since, compare again.
        let replaced = limiter.replace_limits(&level, stored.as_ref(), new, on_unavailable).await?;
        if let Some(config) = replaced {
            return Ok(Replaced { config, dropped, asked });
        }
    }
    Err(Error::Contended { attempts: ATTEMPTS_MAX }.into())
}

/// The limits that apply where the level itself has none, and their level.
async fn inherited(
    level: &ConfigLevel,
    limiter: &RateLimiter,
) -> Result<Option<(ConfigLevel, Vec<Limit>)>, Failure> {
    let resource = match level {
        // What is above the limits for all resources of an entity depends on the resource.
        ConfigLevel::System | ConfigLevel::Entity(_) => return Ok(None),
        ConfigLevel::EntityResource(_, resource) => Some(resource.clone()),
        ConfigLevel::Resource(_) => None,
    };
    let entity = match level {
        ConfigLevel::EntityResource(entity, _) => Some(ConfigLevel::Entity(entity.clone())),
        _ => None,
    };
    let above = [entity, resource.map(ConfigLevel::Resource), Some(ConfigLevel::System)];
    for level in above.into_iter().flatten() {
        let config = limiter.stored_limits(&level).await?;
        let limits = config.map(|config| config.limits.to_limits()).unwrap_or_default();
        if !limits.is_empty() {
            return Ok(Some((level, limits)));
        }
    }
    Ok(None)
}

impl Dropped {
    /// Compares the limits of a level, or those above it if it has none, with the new ones.
    fn between(own: &[Limit], above: Option<(ConfigLevel, Vec<Limit>)>, new: &[Limit]) -> Self {
        let has = |limits: &[Limit], name: &str| limits.iter().any(|limit| limit.name == name);
        let lost = |held: &[Limit]| {
            held.iter().filter(|limit| !has(new, &limit.name)).cloned().collect::<Vec<_>>()
        };
        match above {
            // Nothing was and is set here, as when only the policy changes.
            _ if new.is_empty() => Self::default(),
            Some((level, held)) if own.is_empty() => {
                Self { limits: lost(&held), hidden_from: Some(level), also_at: None }
            }
            above => {
                let limits = lost(own);
                let also = above.filter(|(_, held)| limits.iter().any(|it| has(held, &it.name)));
                Self { limits, hidden_from: None, also_at: also.map(|(level, _)| level) }
            }
        }
    }

    /// `rpm:100/min no longer holds on gpt-4`, and why where that may surprise.
    fn words(&self, changed: &ConfigLevel, verb: &str) -> String {
        let place = match changed {
            ConfigLevel::System => "where the system's defaults apply".to_owned(),
            ConfigLevel::Resource(resource) => format!("on {resource}"),
            level => format!("for {}", describe(level)),
        };
        let whole = "the most specific level applies as a whole";
        let why = match (&self.hidden_from, &self.also_at) {
            (Some(level), _) => format!(" (set for {}; {whole})", describe(level)),
            (None, Some(level)) => {
                format!(" (those of {} do not apply either: {whole})", describe(level))
            }
            (None, None) => String::new(),
        };
        format!("{} {verb} {place}{why}", texts(&self.limits))
    }
}

impl Replaced {
    /// Prints what was stored, in `words`, and what no longer holds.
    pub(crate) fn print(&self, words: &str, context: &mut Context) {
        let printer = &mut context.printer;
        let dropped = self.dropped.limits.iter().map(LimitJson::from).collect();
        printer.done(&SetJson { config: ConfigJson::from(&self.config), dropped }, words);
        if !self.dropped.limits.is_empty() && !self.asked && !printer.is_json() {
            let verb =
                if self.dropped.limits.len() == 1 { "no longer holds" } else { "no longer hold" };
            printer.warn(self.dropped.words(&self.config.level, verb));
        }
    }

    /// As [`print`](Self::print), in the usual words.
    pub(crate) fn print_set(&self, context: &mut Context) {
        self.print(&stored::set_words(&self.config), context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(names: &str) -> Vec<Limit> {
        names.split_whitespace().map(|name| Limit::per_minute(name, 1)).collect()
    }

    #[test]
    fn limits_are_dropped_from_the_level_that_applied() {
        let system = |names| Some((ConfigLevel::System, limits(names)));
        for (own, above, new, dropped) in [
            ("", None, "a", ""),
            ("a b", None, "b c", "a"),
            ("a b", system("a c"), "b", "a"),
            ("", system("a b"), "b", "a"),
            ("", system("a b"), "a b", ""),
            ("a", system("b"), "a", ""),
            ("a b", system("a"), "", ""),
        ] {
            let found = Dropped::between(&limits(own), above.clone(), &limits(new));
            assert_eq!(found.limits, limits(dropped), "{own} {above:?} {new}");
            assert_eq!(found.hidden_from.is_some(), own.is_empty() && above.is_some());
        }
        let both = Dropped::between(&limits("a b"), system("a c"), &limits("b"));
        assert_eq!(both.also_at, Some(ConfigLevel::System));
        let other = Dropped::between(&limits("a b"), system("c"), &limits("b"));
        assert_eq!(other.also_at, None);
    }
}
