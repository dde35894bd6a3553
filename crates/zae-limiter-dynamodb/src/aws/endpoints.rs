//! Endpoints that a variable or a profile sets to nothing.

use aws_config::SdkConfig;
use aws_types::service_config::{LoadServiceConfig, ServiceConfigKey};

/// The settings of single services, without empty ones: the SDK panics on an empty endpoint. The AWS CLI takes it as
/// unset.
#[derive(Debug)]
struct NotEmpty(SdkConfig);

impl LoadServiceConfig for NotEmpty {
    fn load_config(&self, key: ServiceConfigKey<'_>) -> Option<String> {
        self.0.service_config()?.load_config(key).filter(|value| !value.is_empty())
    }
}

/// The configuration, in which an empty endpoint counts as unset.
pub(super) fn without_empty(config: SdkConfig) -> SdkConfig {
    let endpoint = config.endpoint_url().filter(|url| !url.is_empty()).map(str::to_owned);
    let mut builder = config.clone().into_builder().service_config(NotEmpty(config));
    builder.set_endpoint_url(endpoint);
    builder.build()
}
