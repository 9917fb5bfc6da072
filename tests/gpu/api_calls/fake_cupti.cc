// Stands where libcupti is: takes a subscriber, and lets a test make the calls that CUPTI would
// report.

#include <cupti.h>

#include <initializer_list>

namespace {

CUpti_CallbackFunc subscriber_callback = nullptr;
bool is_enabled[CUPTI_CB_DOMAIN_SIZE] = {};

}  // namespace

extern "C" {

CUptiResult CUPTIAPI cuptiSubscribe(CUpti_SubscriberHandle*, CUpti_CallbackFunc callback, void*) {
  subscriber_callback = callback;
  return CUPTI_SUCCESS;
}

CUptiResult CUPTIAPI cuptiEnableDomain(uint32_t enable, CUpti_SubscriberHandle,
                                       CUpti_CallbackDomain domain) {
  is_enabled[domain] = enable != 0;
  return CUPTI_SUCCESS;
}

// A call of `function` from its begin to its end.
void FakeCall(int domain, const char* function) {
  if (!is_enabled[domain]) return;
  for (const CUpti_ApiCallbackSite site : {CUPTI_API_ENTER, CUPTI_API_EXIT}) {
    CUpti_CallbackData data = {};
    data.callbackSite = site;
    data.functionName = function;
    subscriber_callback(nullptr, static_cast<CUpti_CallbackDomain>(domain), 0, &data);
  }
}

}  // extern "C"
