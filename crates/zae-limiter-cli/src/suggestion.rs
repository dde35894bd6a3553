//! Commands that hints suggest. They get the store and namespace options of this run: a copied
//! command must not change another store or namespace.

use zae_limiter::model::{ResourceList, ResourceName, likely, nearest};
use zae_limiter::{Error, RateLimiter};

use crate::cli::Globals;
use crate::failure::Failure;

/// The options by which a suggested command uses the same store and namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// `--store …`, or `-n`, `--region` and `--endpoint-url`.
    store: String,
    /// The same without `-n`, for commands about the account and region.
    account: String,
    /// `-N …`; the namespace commands do not need it.
    namespace: String,
}

impl Place {
    /// Takes the options only: environment variables still apply to the next command.
    pub(crate) fn of(globals: &Globals) -> Self {
        let option = |name: &str, value: Option<&str>| {
            value.map(|value| format!(" {name} {}", quoted(value))).unwrap_or_default()
        };
        let url = option("--store", globals.store.as_deref());
        let name = option("-n", globals.name.as_ref().map(|name| name.as_str()));
        let region = option("--region", globals.region.as_deref());
        let endpoint = option("--endpoint-url", globals.endpoint_url.as_deref());
        Self {
            store: format!("{url}{name}{region}{endpoint}"),
            account: format!("{url}{region}{endpoint}"),
            namespace: option("-N", globals.namespace.as_ref().map(|name| name.as_str())),
        }
    }

    /// Adds the options to every command in the text.
    pub(crate) fn add_to(&self, text: &str) -> String {
        let Self { store, account, namespace } = self;
        let mut text = text.to_owned();
        for command in ["acquire", "available", "entity", "resource", "system", "usage", "audit"] {
            text = text.replace(
                &format!("zae-limiter {command} "),
                &format!("zae-limiter{store}{namespace} {command} "),
            );
        }
        for command in ["deploy", "delete", "status", "upgrade", "check", "aggregate", "bench"] {
            text = text.replace(
                &format!("zae-limiter {command}"),
                &format!("zae-limiter{store} {command}"),
            );
        }
        text.replace("zae-limiter namespace ", &format!("zae-limiter{store} namespace "))
            .replace("zae-limiter list ", &format!("zae-limiter{account} list "))
    }
}

/// The hint for the name of a limit that does not hold: `did you mean rpm? limits that hold: rpm, tpm`. `None` if none
/// hold.
pub(crate) fn limits_that_hold<'a>(
    typed: &str,
    held: impl IntoIterator<Item = &'a str>,
) -> Option<String> {
    let held = nearest(typed, held);
    let guess = likely(typed, held.iter()).map(|name| format!("did you mean {name}? "));
    let guess = guess.unwrap_or_default();
    (!held.is_empty()).then(|| format!("{guess}limits that hold: {}", held.join(", ")))
}

/// Adds the resource that was probably meant to the hint for a call on one without limits.
pub(crate) async fn with_meant_resource(error: Error, limiter: &RateLimiter) -> Failure {
    let guess = match &error {
        Error::UnknownLimits { configured, resource, .. } if configured.is_empty() => {
            meant_resource(resource.as_str(), limiter).await
        }
        _ => String::new(),
    };
    let mut failure = Failure::from(error);
    failure.hint = failure.hint.map(|hint| format!("{guess}{hint}"));
    failure
}

/// `did you mean gpt-4? `, or nothing. Looks at the first page of resources; an error there is not worth reporting.
pub(crate) async fn meant_resource(typed: &str, limiter: &RateLimiter) -> String {
    let page = limiter.resources(ResourceList::WithDefaults).next_page().await;
    let names = page.ok().flatten().unwrap_or_default();
    let meant = likely(typed, names.iter().map(ResourceName::as_str));
    meant.map(|name| format!("did you mean {name}? ")).unwrap_or_default()
}

/// A word quoted for the shell.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@,+".contains(c);
    if word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suggestion_keeps_the_store_and_the_namespace() {
        let place = Place {
            store: format!(" --store {}", quoted("sqlite:a b.db?durability=full")),
            account: " --region eu-west-1".to_owned(),
            namespace: " -N team-a".to_owned(),
        };
        for (text, wanted) in [
            (
                "zae-limiter entity create key-1",
                "zae-limiter --store 'sqlite:a b.db?durability=full' -N team-a entity create key-1",
            ),
            (
                "zae-limiter namespace orphans",
                "zae-limiter --store 'sqlite:a b.db?durability=full' namespace orphans",
            ),
            (
                "zae-limiter aggregate --once",
                "zae-limiter --store 'sqlite:a b.db?durability=full' aggregate --once",
            ),
            ("zae-limiter list shows them", "zae-limiter --region eu-west-1 list shows them"),
            ("created zae-limiter", "created zae-limiter"),
        ] {
            assert_eq!(place.add_to(text), wanted);
            assert_eq!(Place::default().add_to(text), text);
        }
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
