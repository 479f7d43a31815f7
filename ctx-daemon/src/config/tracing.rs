//! Where spans go: to the collector that the file names, or, where it names none, that OpenTelemetry's variables name.

use serde::Deserialize;

use super::error::ConfigError;

/// Where a collector takes spans, below the endpoint of all signals.
const TRACES: &str = "/v1/traces";
/// The port of OTLP over HTTP.
const DEFAULT_PORT: u16 = 4318;

/// The export of spans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TracingConfig {
    /// The collector; none if no spans are made.
    pub(crate) collector: Option<Collector>,
    /// A variable of the environment that names a collector which cannot be used, and why: for the log. Variables may be meant for
    /// other programs, so they do not keep the daemon from starting.
    pub(crate) ignored: Option<String>,
}

/// A collector that takes OTLP over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collector {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) path: String,
    /// Headers of each request: names and values.
    pub(crate) headers: Vec<(String, String)>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TracingTable {
    otlp: Option<String>,
}

impl TracingTable {
    /// Checks the setting. The environment counts only where there is none.
    pub(super) fn checked(self, variable: impl Fn(&str) -> Option<String>) -> Result<TracingConfig, ConfigError> {
        let headers = || headers(&variable("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default());
        match self.otlp {
            Some(none) if none.is_empty() => Ok(TracingConfig::default()),
            Some(url) => match Collector::at(&url, TRACES, headers()) {
                Ok(collector) => Ok(TracingConfig { collector: Some(collector), ignored: None }),
                Err(problem) => Err(ConfigError::Value { what: "tracing.otlp", value: url, problem }),
            },
            None => Ok(named(&variable, headers)),
        }
    }
}

/// The collector that the environment names.
fn named(variable: &impl Fn(&str) -> Option<String>, headers: impl Fn() -> Vec<(String, String)>) -> TracingConfig {
    let is_off = |name, value: &str| variable(name).is_some_and(|it| it.eq_ignore_ascii_case(value));
    if is_off("OTEL_SDK_DISABLED", "true") || is_off("OTEL_TRACES_EXPORTER", "none") {
        return TracingConfig::default();
    }
    let places = [("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""), ("OTEL_EXPORTER_OTLP_ENDPOINT", TRACES)];
    let mut set = places.into_iter().filter_map(|(name, below)| Some((name, variable(name)?, below)));
    let Some((name, url, below)) = set.find(|(_, url, _)| !url.is_empty()) else { return TracingConfig::default() };
    match Collector::at(&url, below, headers()) {
        Ok(collector) => TracingConfig { collector: Some(collector), ignored: None },
        Err(problem) => TracingConfig { collector: None, ignored: Some(format!("{name}: {url:?} {problem}")) },
    }
}

/// `NAME=VALUE,NAME=VALUE`. What is no header is left out.
fn headers(text: &str) -> Vec<(String, String)> {
    let is_plain = |it: &str| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    let pairs = text.split(',').filter_map(|it| it.split_once('='));
    let pairs = pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().replace("%20", " ")));
    pairs.filter(|(name, value)| is_plain(name) && !name.contains([' ', ':']) && is_plain(value)).collect()
}

impl Collector {
    /// The collector at a URL.
    fn at(url: &str, below: &str, headers: Vec<(String, String)>) -> Result<Self, &'static str> {
        let Some(rest) = url.strip_prefix("http://") else {
            return Err(
                "does not begin with http://; name a collector on this machine or in its network, which can pass spans \
                        on over TLS",
            );
        };
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let (host, port) = match authority.rsplit_once(':') {
            // In an address of IPv6 without a port the last colon is in brackets.
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
            _ => (authority, Some(DEFAULT_PORT)),
        };
        let host = host.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(host);
        let is_plain = |it: &str| it.bytes().all(|byte| byte.is_ascii_graphic());
        match port {
            Some(port) if port > 0 && !host.is_empty() && !host.contains('@') && is_plain(rest) => {
                let path = format!("{}{below}", path.trim_end_matches('/'));
                let path = if path.is_empty() { "/".to_owned() } else { path };
                Ok(Self { host: host.to_owned(), port, path, headers })
            }
            _ => Err("is no address of a collector; write it as \"http://127.0.0.1:4318\""),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(otlp: Option<&str>, variables: &[(&str, &str)]) -> Result<TracingConfig, ConfigError> {
        let variable = |name: &str| variables.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
        TracingTable { otlp: otlp.map(str::to_owned) }.checked(variable)
    }

    fn place(otlp: Option<&str>, variables: &[(&str, &str)]) -> Option<(String, u16, String)> {
        checked(otlp, variables).unwrap().collector.map(|it| (it.host, it.port, it.path))
    }

    fn at(host: &str, port: u16, path: &str) -> Option<(String, u16, String)> {
        Some((host.to_owned(), port, path.to_owned()))
    }

    #[test]
    fn the_file_comes_before_the_environment_and_nothing_is_off() {
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:1/");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1]/here");
        assert_eq!(place(None, &[]), None);
        assert_eq!(place(None, &[all]), at("collector", 1, "/v1/traces"));
        assert_eq!(place(None, &[all, traces]), at("::1", 4318, "/here"));
        assert_eq!(place(Some("http://127.0.0.1:9"), &[all, traces]), at("127.0.0.1", 9, "/v1/traces"));
        assert_eq!(place(Some(""), &[all, traces]), None);
        assert_eq!(place(None, &[all, ("OTEL_SDK_DISABLED", "TRUE")]), None);
        assert_eq!(place(None, &[all, ("OTEL_TRACES_EXPORTER", "none")]), None);
    }

    #[test]
    fn an_address_that_cannot_be_used_is_an_error_in_the_file_and_a_note_in_the_environment() {
        for odd in ["https://a:1", "a:1", "http://", "http://a:0", "http://a:70000", "http://u@a:1", "http://a b:1"] {
            assert!(checked(Some(odd), &[]).unwrap_err().to_string().contains("tracing.otlp"), "{odd}");
            let config = checked(None, &[("OTEL_EXPORTER_OTLP_ENDPOINT", odd)]).unwrap();
            assert!(config.collector.is_none() && config.ignored.unwrap().contains(odd), "{odd}");
        }
    }

    #[test]
    fn headers_cannot_end_their_line() {
        let given = "authorization=Basic%20abc, x-scope = a,odd,=b,no name=c,a=b\r\nc: d";
        let config = checked(Some("http://a"), &[("OTEL_EXPORTER_OTLP_HEADERS", given)]).unwrap();
        let expected = [("authorization", "Basic abc"), ("x-scope", "a")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(config.collector.unwrap().headers, expected);
    }
}
