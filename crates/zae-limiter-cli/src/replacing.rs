//! `set-defaults` and `set-limits`: replace the limits of a level, and name those that no longer hold.

use serde::Serialize;
use zae_limiter::model::{ConfigLevel, EntityId, ResourceList};
use zae_limiter::{Config, Error, Limit, OnUnavailable, RateLimiter};

use crate::context::{Context, Yes};
use crate::failure::Failure;
use crate::printer::count;
use crate::stored::{self, ConfigJson, LimitJson, describe, level_word, texts};

/// How often a change is tried again because another client changes the same limits.
const ATTEMPTS_MAX: u32 = 16;

/// How many levels a prompt or a warning names one by one.
const NAMED_MAX: usize = 8;

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
    dropped: Vec<Dropped>,
    /// Whether the user has confirmed what no longer holds.
    asked: bool,
}

/// Limits of one level that held before a change and do not hold after it.
#[derive(Debug, PartialEq, Eq)]
struct Dropped {
    limits: Vec<Limit>,
    /// Where they are set: at the changed level, or at one above it.
    set_for: ConfigLevel,
    /// The level above that also has some of these limits. They do not apply either.
    also_at: Option<ConfigLevel>,
}

/// The limits of a level.
type Held = (ConfigLevel, Vec<Limit>);

#[derive(Serialize)]
struct SetJson {
    #[serde(flatten)]
    config: ConfigJson,
    /// The limits that held before and no longer hold.
    dropped: Vec<DroppedJson>,
}

#[derive(Serialize)]
struct DroppedJson {
    #[serde(flatten)]
    limit: LimitJson,
    /// Where it is set.
    level: &'static str,
    /// The resource of that level.
    resource: Option<String>,
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
        let above = match &level {
            // Its own limits apply to all resources: nothing above them held.
            ConfigLevel::Entity(_) if !own.is_empty() => Vec::new(),
            ConfigLevel::Entity(entity) => defaults_for(entity, limiter).await?,
            level => inherited(level, limiter).await?.into_iter().collect(),
        };
        let dropped = dropped_between((&level, &own), above, &new);
        let question = lines(&dropped, &level, |_| "will no longer hold").join("\n");
        let asked = !dropped.is_empty() && context.confirm_if_possible(yes, &question).await?;
        // What was shown is what is replaced: if the stored limits have changed since, compare again.
        let replaced = limiter.replace_limits(&level, stored.as_ref(), new, on_unavailable).await?;
        if let Some(config) = replaced {
            return Ok(Replaced { config, dropped, asked });
        }
    }
    Err(Error::Contended { attempts: ATTEMPTS_MAX }.into())
}

/// The limits that apply where the level itself has none, and their level. Not for all resources of an entity: what
/// is above those depends on the resource.
async fn inherited(level: &ConfigLevel, limiter: &RateLimiter) -> Result<Option<Held>, Failure> {
    let resource = match level {
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

/// The defaults that apply to an entity without limits for all resources: those of each resource on which it has no
/// limits either, and the system's for all other resources.
async fn defaults_for(entity: &EntityId, limiter: &RateLimiter) -> Result<Vec<Held>, Failure> {
    let mut held = Vec::new();
    if let Some(config) = limiter.system_defaults().await? {
        held.push((ConfigLevel::System, config.limits.to_limits()));
    }
    let mut pages = limiter.resources(ResourceList::WithDefaults);
    while let Some(resources) = pages.next_page().await? {
        for resource in resources {
            let effective = limiter.effective_limits(entity.as_str(), resource.as_str()).await?;
            let level = ConfigLevel::Resource(resource);
            if effective.level.as_ref() == Some(&level) {
                held.push((level, effective.limits));
            }
        }
    }
    Ok(held)
}

/// Compares the limits of a level, or those above it if it has none, with the new ones.
fn dropped_between(
    (level, own): (&ConfigLevel, &[Limit]),
    above: Vec<Held>,
    new: &[Limit],
) -> Vec<Dropped> {
    let has = |limits: &[Limit], name: &str| limits.iter().any(|limit| limit.name == name);
    let lost = |held: &[Limit]| {
        held.iter().filter(|limit| !has(new, &limit.name)).cloned().collect::<Vec<_>>()
    };
    let mut dropped: Vec<Dropped> = if new.is_empty() {
        // Nothing was and is set here, as when only the policy changes.
        Vec::new()
    } else if own.is_empty() {
        let hidden =
            |(set_for, held): Held| Dropped { limits: lost(&held), set_for, also_at: None };
        above.into_iter().map(hidden).collect()
    } else {
        let limits = lost(own);
        let mut above = above.into_iter();
        let also = above.find(|(_, held)| limits.iter().any(|it| has(held, &it.name)));
        let also_at = also.map(|(level, _)| level);
        vec![Dropped { limits, set_for: level.clone(), also_at }]
    };
    dropped.retain(|one| !one.limits.is_empty());
    dropped
}

/// A line for each level whose limits no longer hold, and for the rest of them.
fn lines(
    dropped: &[Dropped],
    changed: &ConfigLevel,
    verb: impl Fn(&Dropped) -> &'static str,
) -> Vec<String> {
    let named = dropped.iter().take(NAMED_MAX);
    let mut lines: Vec<String> = named.map(|one| one.words(changed, verb(one))).collect();
    if let Some(more) = dropped.len().checked_sub(NAMED_MAX).filter(|more| *more > 0) {
        lines.push(format!("the same for the limits of {}", count(more as u64, "more resource")));
    }
    lines
}

impl Dropped {
    /// `rpm:100/min no longer holds on gpt-4`, and why where that may surprise.
    fn words(&self, changed: &ConfigLevel, verb: &str) -> String {
        let place = match (changed, &self.set_for) {
            (ConfigLevel::System, _) => "where the system's defaults apply".to_owned(),
            (ConfigLevel::Resource(resource), _) => format!("on {resource}"),
            (ConfigLevel::Entity(entity), ConfigLevel::Resource(resource)) => {
                format!("for {entity} on {resource}")
            }
            (ConfigLevel::Entity(entity), ConfigLevel::System) => {
                format!("for {entity} on resources without defaults")
            }
            (level, _) => format!("for {}", describe(level)),
        };
        let whole = "the most specific level applies as a whole";
        let why = match &self.also_at {
            _ if self.set_for != *changed => {
                format!(" (set for {}; {whole})", describe(&self.set_for))
            }
            Some(level) => format!(" (those of {} do not apply either: {whole})", describe(level)),
            None => String::new(),
        };
        format!("{} {verb} {place}{why}", texts(&self.limits))
    }

    fn to_json(&self) -> impl Iterator<Item = DroppedJson> {
        let resource = match &self.set_for {
            ConfigLevel::Resource(resource) | ConfigLevel::EntityResource(_, resource) => {
                Some(resource.to_string())
            }
            ConfigLevel::System | ConfigLevel::Entity(_) => None,
        };
        let level = level_word(&self.set_for);
        self.limits.iter().map(move |limit| DroppedJson {
            limit: LimitJson::from(limit),
            level,
            resource: resource.clone(),
        })
    }
}

impl Replaced {
    /// Prints what was stored, in `words`, and what no longer holds.
    pub(crate) fn print(&self, words: &str, context: &mut Context) {
        let printer = &mut context.printer;
        let dropped = self.dropped.iter().flat_map(Dropped::to_json).collect();
        printer.done(&SetJson { config: ConfigJson::from(&self.config), dropped }, words);
        if self.asked || printer.is_json() {
            return;
        }
        let verb = |one: &Dropped| match one.limits.len() {
            1 => "no longer holds",
            _ => "no longer hold",
        };
        for line in lines(&self.dropped, &self.config.level, verb) {
            printer.warn(line);
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

    fn level(resource: &str) -> ConfigLevel {
        ConfigLevel::Resource(resource.parse().expect("a name"))
    }

    fn held(levels: &[(&str, &str)]) -> Vec<Held> {
        levels.iter().map(|(resource, names)| (level(resource), limits(names))).collect()
    }

    #[test]
    fn limits_are_dropped_from_the_levels_that_applied() {
        let changed = ConfigLevel::System;
        for (own, above, new, dropped) in [
            ("", vec![], "a", vec![]),
            ("a b", vec![], "b c", vec![(None, "a")]),
            ("a b", vec![("r", "a c")], "b", vec![(None, "a")]),
            ("", vec![("r", "a b")], "b", vec![(Some("r"), "a")]),
            ("", vec![("r", "a b")], "a b", vec![]),
            ("a", vec![("r", "b")], "a", vec![]),
            ("a b", vec![("r", "a")], "", vec![]),
            (
                "",
                vec![("r", "a b"), ("s", "b"), ("t", "c")],
                "b",
                vec![(Some("r"), "a"), (Some("t"), "c")],
            ),
        ] {
            let found = dropped_between((&changed, &limits(own)), held(&above), &limits(new));
            let found: Vec<_> = found.into_iter().map(|one| (one.set_for, one.limits)).collect();
            let wanted: Vec<_> = dropped
                .iter()
                .map(|(at, names)| (at.map_or(changed.clone(), level), limits(names)))
                .collect();
            assert_eq!(found, wanted, "{own} {above:?} {new}");
        }
        let also = |names| {
            let above = held(&[("r", names)]);
            dropped_between((&changed, &limits("a b")), above, &limits("b")).remove(0).also_at
        };
        assert_eq!((also("a c"), also("c")), (Some(level("r")), None));
    }

    #[test]
    fn only_so_many_levels_are_named() {
        let names: Vec<String> = (0..NAMED_MAX + 2).map(|at| format!("r{at}")).collect();
        let above = names.iter().map(|name| (level(name), limits("a"))).collect();
        let changed = ConfigLevel::Entity("key-1".parse().expect("an id"));
        let dropped = dropped_between((&changed, &[]), above, &limits("b"));
        let lines = lines(&dropped, &changed, |_| "no longer holds");
        assert_eq!(lines.len(), NAMED_MAX + 1);
        assert!(lines[0].starts_with("a:1/min no longer holds for key-1 on r0 (set for"));
        assert_eq!(lines[NAMED_MAX], "the same for the limits of 2 more resources");
    }
}
