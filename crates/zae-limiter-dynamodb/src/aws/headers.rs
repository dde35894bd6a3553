//! The headers that name the program. The SDK reads the environment and writes their texts anew for every call,
//! although they never change.

use std::sync::OnceLock;

use aws_runtime::user_agent::UserAgentInterceptor;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeSerializationInterceptorContextRef, BeforeTransmitInterceptorContextMut,
};
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_smithy_runtime_api::client::interceptors::disable_interceptor;

const NAMES: [&str; 2] = ["user-agent", "x-amz-user-agent"];

/// Keeps the headers of a client's first call for all further ones.
#[derive(Debug, Default)]
pub(super) struct KeptHeaders(OnceLock<[String; NAMES.len()]>);

impl Intercept for KeptHeaders {
    fn name(&self) -> &'static str {
        "KeptHeaders"
    }

    fn read_before_execution(
        &self,
        _: &BeforeSerializationInterceptorContextRef<'_>,
        cfg: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        if self.0.get().is_some() {
            let disabled = disable_interceptor::<UserAgentInterceptor>("the headers are kept");
            cfg.interceptor_state().store_put(disabled);
        }
        Ok(())
    }

    fn modify_before_signing(
        &self,
        context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let headers = context.request_mut().headers_mut();
        if let Some(kept) = self.0.get() {
            for (name, value) in NAMES.into_iter().zip(kept) {
                headers.insert(name, value.clone());
            }
        } else if let [Some(program), Some(sdk)] = NAMES.map(|name| headers.get(name)) {
            // Another call may have been first.
            let _ = self.0.set([program.to_owned(), sdk.to_owned()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use aws_sdk_dynamodb::Client;
    use aws_sdk_dynamodb::config::{BehaviorVersion, Config, Credentials, Region};
    use aws_smithy_runtime_api::client::http::{
        HttpConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
    };
    use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
    use aws_smithy_runtime_api::http::StatusCode;
    use zae_limiter_core::SystemClock;
    use zae_limiter_schema::{Action, ItemKey, Table, Update, Value};

    use super::*;
    use crate::aws::AwsTable;

    type Headers = Vec<(String, String)>;

    /// Keeps the headers of every request.
    #[derive(Clone, Debug, Default)]
    struct Requests(Arc<Mutex<Vec<Headers>>>);

    impl HttpConnector for Requests {
        fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
            let headers = request.headers().iter();
            let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
            self.0.lock().unwrap().push(headers.collect());
            let ok = StatusCode::try_from(200).unwrap();
            HttpConnectorFuture::ready(Ok(HttpResponse::new(ok, "{}".into())))
        }
    }

    #[tokio::test]
    async fn every_request_has_the_headers_of_the_first() {
        let requests = Requests::default();
        let connector = SharedHttpConnector::new(requests.clone());
        let config = Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("eu-west-1"))
            .credentials_provider(Credentials::new("key", "secret", None, None, "test"))
            .http_client(http_client_fn(move |_, _| connector.clone()))
            .build();
        let table = AwsTable::new(Client::from_conf(config), "t", Arc::new(SystemClock));
        let actions = vec![Action::Add("n".to_owned(), Value::number(1))];
        let update = Update { key: ItemKey::new("p", "s"), actions, conditions: Vec::new() };
        for _ in 0..3 {
            table.update(&update).await.unwrap();
        }
        let requests = requests.0.lock().unwrap();
        assert_eq!(requests.len(), 3);
        let values = |request: &[(String, String)], name: &str| -> Vec<String> {
            let found = request.iter().filter(|(other, _)| other == name);
            found.map(|(_, value)| value.clone()).collect()
        };
        for name in NAMES {
            let first = values(&requests[0], name);
            assert!(first.len() == 1 && first[0].starts_with("aws-sdk-rust/"), "{first:?}");
            for request in requests.iter() {
                assert_eq!(values(request, name), first);
            }
        }
        let signed = |request: &[(String, String)]| {
            let signed = values(request, "authorization").pop().unwrap();
            signed.split("SignedHeaders=").nth(1).unwrap().split(',').next().unwrap().to_owned()
        };
        assert_eq!(signed(&requests[2]), signed(&requests[0]));
    }
}
