//! The settings of the aggregator.

use std::collections::BTreeMap;
use std::time::Duration;

use zae_limiter_core::{Invalid, UsageSettings, Window};

/// The settings of the aggregator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The windows of usage records, and how long they are kept.
    pub usage: UsageSettings,
    /// Whether the aggregator refills buckets that run short before the next call does.
    pub refill: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { usage: UsageSettings::default(), refill: true }
    }
}

const DAY_S: u64 = 86_400;
/// A hundred years.
const RETENTION_DAYS_MAX: u64 = 36_500;

impl Settings {
    /// Reads the settings from environment variables: `SNAPSHOT_WINDOWS` (default
    /// `hourly,daily,monthly`), `SNAPSHOT_TTL_DAYS` (90) and `ENABLE_REFILL` (`true`).
    ///
    /// # Errors
    ///
    /// [`Invalid`], naming the variable.
    pub fn of_env(env: &BTreeMap<String, String>) -> Result<Self, Invalid> {
        let mut settings = Self::default();
        if let Some(text) = env.get("SNAPSHOT_WINDOWS") {
            settings.usage.windows = windows(text)?;
        }
        if let Some(text) = env.get("SNAPSHOT_TTL_DAYS") {
            let days = text.trim().parse().ok();
            let days = days.filter(|days| (1..=RETENTION_DAYS_MAX).contains(days));
            let rule = "use a whole number of days, 1 to 36500";
            let days = days.ok_or_else(|| Invalid::new("SNAPSHOT_TTL_DAYS", text, rule))?;
            settings.usage.retention = Duration::from_secs(days * DAY_S);
        }
        settings.refill = flag(env, "ENABLE_REFILL")?.unwrap_or(true);
        Ok(settings)
    }
}

fn windows(text: &str) -> Result<Vec<Window>, Invalid> {
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    let windows: Result<Vec<Window>, Invalid> = words.map(str::parse).collect();
    let rule = "use hourly, daily and monthly, with commas between them";
    let mut windows = windows.map_err(|_| Invalid::new("SNAPSHOT_WINDOWS", text, rule))?;
    windows.sort_unstable();
    windows.dedup();
    Ok(windows)
}

/// Reads a boolean variable. `None` if it is not set.
///
/// # Errors
///
/// [`Invalid`] for anything but `true` and `false`.
pub fn flag(env: &BTreeMap<String, String>, name: &'static str) -> Result<Option<bool>, Invalid> {
    match env.get(name).map(|text| text.trim().to_ascii_lowercase()) {
        None => Ok(None),
        Some(text) if text == "true" => Ok(Some(true)),
        Some(text) if text == "false" || text.is_empty() => Ok(Some(false)),
        Some(text) => Err(Invalid::new(name, &text, "use true or false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(variables: &[(&str, &str)]) -> Result<Settings, Invalid> {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Settings::of_env(&variables.iter().map(own).collect())
    }

    #[test]
    fn settings_come_from_the_environment() {
        assert_eq!(check(&[]), Ok(Settings::default()));
        let settings = check(&[
            ("SNAPSHOT_WINDOWS", "daily, hourly,daily"),
            ("SNAPSHOT_TTL_DAYS", "7"),
            ("ENABLE_REFILL", "False"),
        ]);
        let settings = settings.expect("legal");
        assert_eq!(settings.usage.windows, [Window::Hourly, Window::Daily]);
        assert_eq!(settings.usage.retention, Duration::from_secs(7 * DAY_S));
        assert!(!settings.refill);
        assert_eq!(check(&[("SNAPSHOT_WINDOWS", "")]).expect("legal").usage.windows, []);
        for bad in [
            ("SNAPSHOT_WINDOWS", "weekly"),
            ("SNAPSHOT_TTL_DAYS", "0"),
            ("SNAPSHOT_TTL_DAYS", "soon"),
            ("ENABLE_REFILL", "maybe"),
        ] {
            let error = check(&[bad]).expect_err(bad.1);
            assert!(error.to_string().contains(bad.0), "{error}");
        }
    }
}
